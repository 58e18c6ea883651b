"""The thread stream: who called whom in a conversation."""
