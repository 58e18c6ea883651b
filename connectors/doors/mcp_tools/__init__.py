"""The MCP doors: the tools of agents, and those of a person who manages jobs."""
