"""Serves MCP on stdin and stdout, for an MCP host: a program that starts MCP servers by a command.

  trunkline mcp management      for the operator: tools to spawn, list and stop agents
  trunkline mcp agent           for an agent: its tools to discover, write and read, its requests signed

The host's configuration names these commands; 'trunkline mcp ACTION --help' shows the lines for it. The
gateway must run ('trunkline up'). Only JSON-RPC is written to stdout; faults go to stderr.

Exit codes: 0 when the input ends; 2 wrong arguments or settings, or a key file that cannot be used; 4 refused;
5 the gateway does not answer. Ctrl-C ends it at once; agents that were spawned run on.
"""

from __future__ import annotations

import json
import os
from typing import Final

from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.call import Call
from schemas.settings.settings import PROJECT_ROOT

_PROGRAM: Final = PROJECT_ROOT / "trunkline"


def _host_configuration(action: str, **more: object) -> str:
    server = {"command": str(_PROGRAM), "args": ["mcp", action], **more}
    return json.dumps({"mcpServers": {"trunkline": server}}, indent=2)


_MANAGEMENT_HELP: Final = f"""
Put this into the configuration of the operator's MCP host:

{_host_configuration("management")}

A gateway elsewhere: "env": {{"TRUNKLINE__GATEWAY__URL": "http://host:3200", "TRUNKLINE_TOKEN": "..."}}.
'trunkline agents' does the same without MCP.
"""
_AGENT: Final = {"AGENT_ID": "builder", "AGENT_KEY_PATH": str(_PROGRAM.with_name("builder.pem"))}
_AGENT_HELP: Final = f"""
First admit the agent. This makes its key, and sends the public half to the gateway:

  trunkline agents join builder --new-key builder.pem

Then put this into the configuration of the agent's MCP host:

{_host_configuration("agent", env=_AGENT)}

The options take precedence over the variables AGENT_ID, AGENT_KEY_PATH and MCP_SERVER_URL.
"""
ACTIONS: Final = Actions()


@ACTIONS.add(epilog=_MANAGEMENT_HELP, takes_json=False)
def _management(call: Call) -> int:
    """Serve tools to spawn, list, stop and write to agents, with the operator's token."""
    from connectors.doors.mcp_tools.management.management_server import serve

    return serve(call.settings)


@ACTIONS.add(
    argument("--id", "the agent's name (AGENT_ID)", metavar="NAME"),
    argument("--key", "its private key, mode 0600 (AGENT_KEY_PATH)", metavar="FILE"),
    argument("--url", "the agent MCP server (MCP_SERVER_URL; default: that of the settings)"),
    epilog=_AGENT_HELP,
    takes_json=False,
)
def _agent(call: Call) -> int:
    """Pass an agent's calls on to the agent MCP server, signed with its key."""
    from trunkline_agent.credentials import (
        AGENT_ID_VARIABLE,
        AGENT_KEY_VARIABLE,
        CA_VARIABLE,
        MCP_URL_VARIABLE,
    )
    from trunkline_agent.mcp.stdio_wrapper import main

    given = {AGENT_ID_VARIABLE: call.id, AGENT_KEY_VARIABLE: call.key, MCP_URL_VARIABLE: call.url}
    chosen = {name: value for name, value in given.items() if value is not None}
    if call.settings.gateway.ca_certs is not None:
        os.environ.setdefault(CA_VARIABLE, str(call.settings.gateway.ca_certs))
    return main({MCP_URL_VARIABLE: call.settings.mcp_server_url, **os.environ, **chosen})
