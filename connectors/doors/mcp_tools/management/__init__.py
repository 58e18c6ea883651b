"""The management MCP server (AM-09): an operator's MCP host starts agents and reads the operator's messages.

It is a client of the gateway over HTTP and must not import the gateway.
"""
