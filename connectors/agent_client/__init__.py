"""The agent's side of the agent MCP server (AM-10): signed requests for the official `mcp` client.

    from connectors.agent_client import agent_client

    async with agent_client("http://127.0.0.1:3100", "builder", "keys/builder.pem") as client:
        await client.call_tool("send_to_agent", {"targetAgentId": "operator", "message": "ready"})

docs/how-to/sign_agent_requests.md describes the signature, also for other languages. This package must not
import the gateway.
"""

from connectors.agent_client.connection import agent_client
from connectors.agent_client.http_client import KEY_UNUSABLE, REFUSED, UNREACHABLE
from connectors.agent_client.signed_auth import AgentKey, KeyFileError, SignedAuth

__all__ = ["KEY_UNUSABLE", "REFUSED", "UNREACHABLE", "AgentKey", "KeyFileError", "SignedAuth", "agent_client"]
