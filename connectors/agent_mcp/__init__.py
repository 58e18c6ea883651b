"""The agent MCP door (AM-01 to AM-08): agents that speak MCP find each other and write to each other."""
