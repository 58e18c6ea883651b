"""Sends and receives the hub's messages, and shows what became of them.

  trunkline messages send echo ask --text "what time is it?"
  trunkline messages send echo ask '{"text": "what time is it?", "in": "UTC"}'
  trunkline messages send echo ask @question.json                - takes standard input
  trunkline messages broadcast news --text "soup is ready"          to everybody who takes part, but oneself
  trunkline messages drain                          takes the messages out of one's own mailbox
  trunkline messages xml question.xml               an XML document to the pump's listeners; - is standard input
  trunkline messages peek default/echo              shows what lies in a mailbox and takes nothing
  trunkline messages clear default/echo             takes out what waits there, for good (operator)
  trunkline messages audit --limit 20               what was delivered, and what was refused
  trunkline messages export                         all messages into one Parquet file, for DuckDB and the like

Whose messages 'drain' takes, and who sends, is said by the token: the operator's, unless TRUNKLINE_TOKEN holds
another. Each message goes to one drain; the same --request-id again gets the same messages.

'export' reads the tables, so it needs no gateway and has what 'streams' has settled. The gateway does the same
every hour (agent_mcp.export_interval_ms).

Exit codes: 0; 2 wrong arguments; 3 no such recipient, nothing found; 4 refused, with the reason; 5 the gateway
does not answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connectors.cli.shared.hub_options import add_action, add_limit, add_request_id

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


class _PayloadParser(argparse.ArgumentParser):
    """Takes a payload also behind options, where argparse has already decided that there is none."""

    takes_payload = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, left = super().parse_known_args(args, namespace)
        if self.takes_payload and found.payload is None and left and (left[0] == "-" or left[0][:1] != "-"):
            found.payload, *left = left
        return found, left


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=_PayloadParser
    )
    _configure_send(commands)
    _configure_broadcast(commands)
    _configure_xml(commands)
    drain = add_action(
        commands,
        "drain",
        "take the messages out of one's own mailbox, the most urgent first",
        "trunkline messages drain --limit 10 --json | jq '.messages[].payload'",
    )
    drain.add_argument("--limit", type=int, metavar="N", help="at most (default: 100)")
    add_request_id(drain, "the same drain, and gets the same messages")
    peek = add_action(
        commands,
        "peek",
        "show the newest messages of a mailbox, also those that were taken; take none",
        "trunkline messages peek default/echo",
    )
    peek.add_argument(
        "mailbox",
        nargs="?",
        default="operator",
        metavar="REALM/NAME",
        help="whose mailbox; NAME alone is default/NAME (default: default/operator)",
    )
    add_limit(peek)
    clear = add_action(
        commands,
        "clear",
        "take all out of a mailbox that waits there; nobody gets it any more (for the operator)",
        "trunkline messages clear default/echo",
    )
    clear.add_argument("mailbox", metavar="REALM/NAME", help="whose mailbox; NAME alone is default/NAME")
    add_request_id(clear, "the same clearing, and takes out nothing more")
    audit = add_action(
        commands,
        "audit",
        "show the newest messages that were delivered, and requests to send one that were refused",
        "trunkline messages audit --limit 20",
    )
    audit.add_argument("--limit", type=int, metavar="N", help="at most (default: all that the gateway keeps)")
    export = add_action(
        commands,
        "export",
        "write all messages into one Parquet file, in the place of an older one",
        "trunkline messages export && duckdb -c \"select * from 'var/export/messages.parquet'\"",
    )
    export.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="where to (default: agent_mcp.export_file, <data_dir>/export/messages.parquet)",
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    from connectors.cli.messages.messages_actions import ACTIONS

    return ACTIONS[args.action](args, settings)


def _configure_broadcast(commands: argparse._SubParsersAction[_PayloadParser]) -> None:
    example = 'trunkline messages broadcast news --text "soup is ready"'
    text = "put a message into the mailbox of everybody who takes part, and of the operator, but not one's own"
    broadcast = add_action(commands, "broadcast", text, example)
    _with_payload(broadcast)
    add_request_id(broadcast, "the same broadcast; who has come meanwhile gets it, too")


def _configure_xml(commands: argparse._SubParsersAction[_PayloadParser]) -> None:
    example = "trunkline messages xml question.xml"
    text = "send an XML document to the listener that it names, or to all that take its root tag"
    xml = add_action(commands, "xml", text, example)
    xml.add_argument(
        "file", metavar="FILE", help="the document, a <message> with a payload; - is standard input"
    )
    xml.add_argument(
        "--as", dest="sender", metavar="LISTENER", help="in the name of a human listener (operator)"
    )
    add_request_id(xml, "the same message, not a second one")


def _with_payload(command: _PayloadParser) -> None:
    command.add_argument("type", metavar="TYPE", help="what kind of message it is, e.g. ask")
    command.takes_payload = True
    command.add_argument(
        "payload",
        nargs="?",
        metavar="PAYLOAD",
        help="any JSON; - takes it from standard input, @FILE from a file",
    )
    command.add_argument("--text", metavar="TEXT", help='instead of PAYLOAD: {"text": TEXT}')


def _configure_send(commands: argparse._SubParsersAction[_PayloadParser]) -> None:
    example = 'trunkline messages send echo ask --text "what time is it?"'
    send = add_action(commands, "send", "put a message into somebody's mailbox", example)
    send.add_argument("recipient", metavar="RECIPIENT", help="an agent, a principal, operator, or hub")
    _with_payload(send)
    add_request_id(send, "the same message, not a second one")
