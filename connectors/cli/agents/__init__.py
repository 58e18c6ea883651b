"""Commands about agents, sessions, principals and tokens."""
