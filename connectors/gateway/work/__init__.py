"""HTTP routes for jobs, sessions, tasks and tokens.

Must not import other route packages.
"""
