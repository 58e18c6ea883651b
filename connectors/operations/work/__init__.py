"""Operations on jobs, sessions, tasks and tokens. Of the other families it imports `rules` alone."""
