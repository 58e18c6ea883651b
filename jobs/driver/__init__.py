"""Background threads, the lock of the views, and exit codes of the jobs' programs.

Imports nothing else of the jobs.
"""
