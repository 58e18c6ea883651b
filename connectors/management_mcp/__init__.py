"""The management MCP door (AM-09): an operator's MCP host spawns, lists, stops agents and writes to them."""
