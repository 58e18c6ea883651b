"""The engine, the live view, and the services that act by themselves. It imports the log and below."""
