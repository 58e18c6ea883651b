"""The stream `webhook/<name>`: the address that is called with the messages of a mailbox or a topic."""
