"""Commands about keys and certificates."""
