"""Output of programs: JSON logs, their rate limit, and colours on a terminal.

Must not import anything else of `connectors`.
"""
