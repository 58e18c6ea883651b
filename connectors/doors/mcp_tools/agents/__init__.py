"""The agent MCP server (AM-01 to AM-08): agents that speak MCP find each other and exchange messages.

It uses the gateway's services and must not import the dashboard or the command line.
"""
