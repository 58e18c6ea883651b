"""The principal stream: users of the HTTP hub, their roles and tokens."""
