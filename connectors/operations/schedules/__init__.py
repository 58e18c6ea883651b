"""Operations of schedules."""
