"""Speaks MCP on stdin and stdout, for a program that starts MCP servers by a command (an MCP host).

  trunkline mcp management      for the operator: tools to spawn, list and stop agents
  trunkline mcp agent           for an agent: its tools to discover, write and read, its requests signed

You rarely type these: the host's configuration names them, and 'trunkline mcp ACTION --help' shows what to put
there. The gateway must run ('trunkline up'). Nothing but JSON-RPC comes out on stdout; faults go to stderr.

Exit codes: 0 when the input ends; 2 wrong arguments or settings, or a key file that cannot be used; 4 refused;
5 the gateway does not answer. Ctrl-C ends it at once; agents that were spawned run on.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from schemas.settings.settings import PROJECT_ROOT

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_PROGRAM = PROJECT_ROOT / "trunkline"
_Commands = argparse._SubParsersAction


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add(
        commands,
        "management",
        "serve tools to spawn, list, stop and write to agents, with the operator's token",
        """
Put this into the configuration of the operator's MCP host:

%(snippet)s

A gateway elsewhere: "env": {"TRUNKLINE__GATEWAY__URL": "http://host:3200", "TRUNKLINE_TOKEN": "..."}.
'trunkline agents' does the same without MCP.
""",
        {"command": str(_PROGRAM), "args": ["mcp", "management"]},
    )
    agent = _add(
        commands,
        "agent",
        "pass an agent's calls on to the agent MCP server, signed with its key",
        """
First let the agent take part. This makes its key, and tells the gateway the public half:

  trunkline agents join builder --new-key builder.pem

Then put this into the configuration of the agent's MCP host:

%(snippet)s

The options come before the variables AGENT_ID, AGENT_KEY_PATH and MCP_SERVER_URL.
""",
        {
            "command": str(_PROGRAM),
            "args": ["mcp", "agent"],
            "env": {"AGENT_ID": "builder", "AGENT_KEY_PATH": str(_PROGRAM.with_name("builder.pem"))},
        },
    )
    agent.add_argument("--id", metavar="NAME", help="who it is (AGENT_ID)")
    agent.add_argument("--key", metavar="FILE", help="its private key, mode 0600 (AGENT_KEY_PATH)")
    agent.add_argument(
        "--url", metavar="URL", help="the agent MCP server (MCP_SERVER_URL; default: that of the settings)"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Serve to the end of the input and return the exit code."""
    if args.action == "management":
        from connectors.management_mcp.management_server import serve

        return serve(settings)
    from connectors.agent_client.stdio_wrapper import main
    from connectors.gateway_client.gateway_tls import CA_VARIABLE
    from connectors.launcher.protocol import AGENT_ID_VARIABLE, AGENT_KEY_VARIABLE, MCP_URL_VARIABLE

    given = {AGENT_ID_VARIABLE: args.id, AGENT_KEY_VARIABLE: args.key, MCP_URL_VARIABLE: args.url}
    chosen = {name: value for name, value in given.items() if value is not None}
    if settings.gateway.ca_certs is not None:
        os.environ.setdefault(CA_VARIABLE, str(settings.gateway.ca_certs))
    return main({MCP_URL_VARIABLE: settings.mcp_server_url, **os.environ, **chosen})


def _add(
    commands: _Commands[argparse.ArgumentParser], name: str, text: str, epilog: str, server: dict[str, Any]
) -> argparse.ArgumentParser:
    snippet = json.dumps({"mcpServers": {"trunkline": server}}, indent=2)
    return commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog % {"snippet": snippet},
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
