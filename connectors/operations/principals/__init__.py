"""Operations of principals, their limits, and their mailboxes for an operator."""
