"""The gateway as a program: composes hub, dashboard, MCP door and out-of-band door.

Nothing imports it.
"""
