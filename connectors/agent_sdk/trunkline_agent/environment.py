"""The names of the variables that an agent's environment may have, beside those of `credentials`."""

from __future__ import annotations

from typing import Final

from trunkline_agent.credentials import CA_VARIABLE

__all__ = ["AGENT_ID_VARIABLE", "AGENT_KEY_VARIABLE", "CA_VARIABLE", "MCP_URL_VARIABLE"]

# The agent MCP door: the agent's name, the path of its private key, and the server's address.
AGENT_ID_VARIABLE: Final = "AGENT_ID"
AGENT_KEY_VARIABLE: Final = "AGENT_KEY_PATH"
MCP_URL_VARIABLE: Final = "MCP_SERVER_URL"
