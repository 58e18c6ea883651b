"""Output of programs: JSON logs, their rate limit, and text that is safe on a terminal.

Imports nothing else of `connectors`.
"""
