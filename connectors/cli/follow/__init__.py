"""Commands that follow events: monitor and tail."""
