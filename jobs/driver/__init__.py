"""Background threads, the claim of the tables, and exit codes of the jobs' programs.

Imports nothing else of the jobs.
"""
