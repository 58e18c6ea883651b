"""Sockets, rates, and the pauses between attempts."""
