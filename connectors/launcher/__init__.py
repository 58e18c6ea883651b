"""Starts, looks at and stops what the agents of tasks run as (HH-05)."""
