"""The task stream: a task and the token that it has while it runs."""
