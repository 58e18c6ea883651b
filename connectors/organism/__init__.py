"""Files that declare agents and listeners: the organism file, handlers and agent definitions."""
