"""The HTTP hub: jobs, sessions, principals, what is settled, and the one place that decides who may do what."""
