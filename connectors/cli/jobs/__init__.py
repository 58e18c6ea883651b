"""Commands about jobs and tasks."""
