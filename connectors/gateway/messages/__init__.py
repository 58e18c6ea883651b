"""HTTP routes for messages and principals."""
