"""The mailbox and thread streams: messages, leases, and conversations between listeners."""
