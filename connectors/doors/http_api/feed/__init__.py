"""HTTP streams of settled records: server-sent events, and lines of verdicts.

Must not import other route packages, except for the JSON of participants and the path of jobs.
"""
