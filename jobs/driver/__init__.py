"""Background threads and exit codes of the driver's programs.

Imports nothing else of the jobs.
"""
