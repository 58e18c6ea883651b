"""Writing the view tables."""
