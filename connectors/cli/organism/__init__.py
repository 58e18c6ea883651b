"""Commands about listeners, and the console."""
