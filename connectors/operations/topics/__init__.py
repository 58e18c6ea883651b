"""Operations of topics, and messages to many recipients."""
