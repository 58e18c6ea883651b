"""The gateway as a program: hub, dashboard, MCP door and out-of-band door in one process.

It composes the other packages. No package may import it.
"""
