"""Operations on messages and their leases, and the answers that show messages.

Of the other families it imports `blobs` and `rules` alone.
"""
