"""Operations of principals and their limits, and on mailboxes and dead messages for an operator."""
