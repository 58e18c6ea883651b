"""The names of the variables that an agent's environment may have."""

from __future__ import annotations

from typing import Final

# The authority that signed the certificates of the gateway and the broker, a PEM file.
CA_VARIABLE: Final = "TRUNKLINE_CA_CERTS"
# The agent MCP door: the agent's name, the path of its private key, and the server's address.
AGENT_ID_VARIABLE: Final = "AGENT_ID"
AGENT_KEY_VARIABLE: Final = "AGENT_KEY_PATH"
MCP_URL_VARIABLE: Final = "MCP_SERVER_URL"
