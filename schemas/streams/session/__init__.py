"""The session stream: agent sessions that host jobs."""
