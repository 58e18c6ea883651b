"""The agent's side of the agent MCP server (AM-10): signed requests for the official `mcp` client.

    from trunkline_agent.mcp import agent_client, connect

    async with agent_client("http://127.0.0.1:3100", "builder", "keys/builder.pem") as client:
        await client.call_tool("send_to_agent", {"targetAgentId": "operator", "message": "ready"})

It needs the extra `[mcp]`. The names of this package are imported when they are first used, because the
official client takes a second to import.
docs/how-to/sign_agent_requests.md describes the signature, also for other languages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trunkline_agent.extras import require_extra

if TYPE_CHECKING:
    from trunkline_agent.mcp.connection import agent_client, connect, known_error
    from trunkline_agent.mcp.http_client import KEY_UNUSABLE, REFUSED, UNREACHABLE
    from trunkline_agent.mcp.private_keys import AgentKey, KeyFileError, KeyText
    from trunkline_agent.mcp.signed_auth import SignedAuth
    from trunkline_agent.mcp.tool_calls import AsyncToolCalls

require_extra("mcp")

__all__ = [
    "KEY_UNUSABLE",
    "REFUSED",
    "UNREACHABLE",
    "AgentKey",
    "AsyncToolCalls",
    "KeyFileError",
    "KeyText",
    "SignedAuth",
    "agent_client",
    "connect",
    "known_error",
]
_MODULES = {
    "agent_client": "connection",
    "connect": "connection",
    "known_error": "connection",
    "KEY_UNUSABLE": "http_client",
    "REFUSED": "http_client",
    "UNREACHABLE": "http_client",
    "AgentKey": "private_keys",
    "KeyFileError": "private_keys",
    "KeyText": "private_keys",
    "SignedAuth": "signed_auth",
    "AsyncToolCalls": "tool_calls",
}


require_extra("mcp")


def __getattr__(name: str) -> Any:
    """Import a public name of this package at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
