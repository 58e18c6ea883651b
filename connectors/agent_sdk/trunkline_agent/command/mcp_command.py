"""`trunkline-agent mcp`: the signing MCP server on stdio, for an MCP host."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any, Final

from trunkline_agent.command.command_options import add_command, credentials_of
from trunkline_agent.credentials import AGENT_ID_VARIABLE, FILE_VARIABLE

_HELP: Final = """\
Serve the agent's tools as an MCP server on stdio: to find agents, write to them, and read the mailbox. Each
request is signed with the private key of the credentials, and goes to the agent MCP server that they name.

An MCP host starts the command. This belongs into its configuration:

  {
    "mcpServers": {
      "trunkline": {
        "command": "trunkline-agent",
        "args": ["mcp"],
        "env": {"TRUNKLINE_CREDENTIALS": "builder.json"}
      }
    }
  }

Without credentials, AGENT_ID, AGENT_KEY_PATH and MCP_SERVER_URL name the agent, the file of its private key and
the server. Only JSON-RPC is written to stdout; faults go to stderr.
"""


def add_to(commands: Any) -> None:
    """Add the subcommand `mcp`."""
    add_command(commands, "mcp", _run, "be an MCP server on stdio for an MCP host", _HELP)


def _run(given: argparse.Namespace) -> int:
    # An interrupt during the imports, which take a second, ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    is_spawned = given.credentials is None and not os.environ.get(FILE_VARIABLE)
    if is_spawned and os.environ.get(AGENT_ID_VARIABLE):
        wrapper = _wrapper()
        return int(wrapper.main())
    credentials = credentials_of(given)
    access = credentials.mcp_access()
    wrapper = _wrapper()
    from trunkline_agent.mcp.private_keys import KeyText

    key = KeyText(access.private_key)
    return int(wrapper.serve_stdio(access.url, credentials.name, key, credentials.ca_certs))


def _wrapper() -> Any:
    from trunkline_agent.mcp import stdio_wrapper

    return stdio_wrapper
