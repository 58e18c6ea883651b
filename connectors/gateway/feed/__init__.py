"""HTTP routes that stream settled events."""
