"""Output of programs: JSON logs, their rate limit, and text that is safe to display on a terminal.

Must not import anything else of `connectors`.
"""
