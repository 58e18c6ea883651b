"""Commands about messages and dead letters."""
