"""The management MCP door (AM-09): an operator's MCP host spawns agents, lists and stops them, over stdio."""
