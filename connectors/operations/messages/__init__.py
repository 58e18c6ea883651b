"""Operations on messages, mailboxes and principals.

Must not import other route packages.
"""
