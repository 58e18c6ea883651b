"""HTTP routes for jobs, sessions and tasks."""
