"""The mailbox stream: messages, claims and leases."""
