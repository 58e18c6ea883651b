"""Operations on jobs, sessions, tasks and tokens.

Must not import other route packages.
"""
