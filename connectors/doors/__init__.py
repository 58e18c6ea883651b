"""The protocols: a door decodes, authenticates, asks an operation, and encodes. It imports no other door."""
