"""What `trunkline messages` does for each action."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.given_content import STANDARD_INPUT, read_given
from connectors.cli.shared.hub_options import named_request
from connectors.cli.shared.hub_rows import Row, checked_name, print_rows
from connectors.cli.shared.text_table import age_of, fields, print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.terminal.terminal_text import escaped
from connectors.xml_wire.posting import post_xml
from schemas.errors import NotFound, Refused, UsageError
from schemas.wire.strict_json import MalformedJsonError, decode

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_DEFAULT_REALM: Final = "default"
_FILE_MARK: Final = "@"


def send(args: argparse.Namespace, settings: Settings) -> int:
    """Send a message."""
    body = {"recipient": args.recipient, "type": args.type, "payload": _said(args, settings)}
    with (
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "the message was delivered") as request_id,
    ):
        answer = gateway.post(path_of("messages"), body, request_id=request_id)
    if args.json:
        print_json({**answer, "request_id": request_id})
    else:
        print(f"message {escaped(answer['message_id'])} lies in the mailbox of {escaped(args.recipient)}")
    return 0


def broadcast(args: argparse.Namespace, settings: Settings) -> int:
    """Send a message to everybody."""
    body = {"type": args.type, "payload": _said(args, settings)}
    with (
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "messages were delivered") as request_id,
    ):
        answer = gateway.post(path_of("messages", "broadcast"), body, request_id=request_id)
    if args.json:
        print_json({**answer, "request_id": request_id})
    else:
        print(f"broadcast {escaped(answer['broadcast_id'])} lies in {answer['recipients']} mailboxes")
    return 0


def _said(args: argparse.Namespace, settings: Settings) -> Any:
    if args.text is not None and args.payload is not None:
        raise UsageError("give PAYLOAD or --text, not both")
    return {"text": args.text} if args.text is not None else _payload(args.payload, settings)


def _payload(given: str | None, settings: Settings) -> Any:
    if given is None:
        return None
    limit = settings.limits.payload_bytes
    if given == STANDARD_INPUT:
        raw = read_given(STANDARD_INPUT, "PAYLOAD", limit)
    elif given.startswith(_FILE_MARK):
        raw = read_given(given.removeprefix(_FILE_MARK), "PAYLOAD", limit)
    else:
        raw = os.fsencode(given)
    try:
        return decode(raw)[0]
    except MalformedJsonError as error:
        raise UsageError(f"PAYLOAD: {error}; plain text goes with --text") from None


def send_xml(args: argparse.Namespace, settings: Settings) -> int:
    """Send an XML document; a <huh> is printed and is a refusal."""
    document = read_given(args.file, "FILE", settings.limits.payload_bytes)
    with (
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "the message was delivered") as request_id,
    ):
        posted = post_xml(gateway, document, sender=args.sender, request_id=request_id)
    if args.json:
        said = {"thread": posted.thread, "messages": posted.messages, "huh": posted.huh}
        print_json({**said, "request_id": request_id})
    elif posted.huh is None:
        for recipient, message_id in posted.messages.items():
            print(f"message {escaped(message_id)} waits for {escaped(recipient)}")
        print(f"thread  {escaped(posted.thread)}")
    else:
        from connectors.cli.organism.xml_text import shown_xml

        print(shown_xml(posted.huh))
    if posted.huh is not None:
        raise Refused("it was not understood; the <huh> says what would be right")
    return 0


def drain(args: argparse.Namespace, settings: Settings) -> int:
    """Take the messages out of the caller's mailbox; NotFound when none waits there."""
    with (
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "messages were taken") as request_id,
    ):
        # The client sends it again when no answer comes: by the same name it gets what was taken then.
        headers = {"X-Request-ID": request_id}
        found = gateway.get(path_of("messages"), {"limit": args.limit}, headers=headers)
    if args.json:
        print_json({**found, "request_id": request_id})
        return 0
    messages = found["messages"]
    if not messages:
        raise NotFound("no message waits")
    # First, because they are taken, and whoever reads what follows may break off.
    print(
        f"{len(messages)} taken, {found['left']} left; the same again: --request-id {request_id}",
        file=sys.stderr,
        flush=True,
    )
    print("\n\n".join(fields({**row, "payload": _as_json(row["payload"])}) for row in messages))
    return 0


def _as_json(payload: object) -> str:
    # Not ASCII alone: people read it. `fields` escapes what a terminal would obey.
    return json.dumps(payload, ensure_ascii=False)


def peek(args: argparse.Namespace, settings: Settings) -> int:
    """Show the newest messages of a mailbox."""
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of(*_mailbox(args)), {"limit": args.limit})
    heading = ("MESSAGE", "STATE", "AGE", "FROM", "TYPE", "PRIORITY", "TAKEN BY", "BODY")

    def cells(row: Row) -> tuple[object, ...]:
        sender = row["sender"] if row["from_verified"] else f"{row['sender']} (not verified)"
        age = age_of(row["posted_at"])
        said = (row[name] for name in ("kind", "priority", "handed_to", "body"))
        return row["message_id"], row["status"], age, sender, *said

    return print_rows(args, found, "messages", heading, cells)


def _mailbox(args: argparse.Namespace) -> tuple[str, str, str]:
    realm, slash, name = args.mailbox.rpartition("/")
    if not slash:
        realm = _DEFAULT_REALM
    return "mailboxes", checked_name(realm, "a realm"), checked_name(name, "a mailbox")


def clear(args: argparse.Namespace, settings: Settings) -> int:
    """Take all out of a mailbox that waits there."""
    path = path_of(*_mailbox(args), "clear")
    with (
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "the mailbox was cleared") as request_id,
    ):
        answer = gateway.post(path, request_id=request_id)
    if args.json:
        print_json({**answer, "request_id": request_id})
    else:
        print(f"{answer['cleared']} messages were taken out of {escaped(args.mailbox)}")
    return 0


def export(args: argparse.Namespace, settings: Settings) -> int:
    """Write all messages into a Parquet file."""
    # Imported here: Arrow and deltalake take their time, and the other actions do without.
    from connectors.ledger_files.message_export import export_file, export_messages

    made = export_messages(settings, export_file(settings) if args.file is None else args.file)
    if args.json:
        print_json({"file": str(made.file), "messages": made.messages, "bytes": made.size_bytes})
    else:
        print(f"{made.messages} messages are in {escaped(str(made.file))} ({made.size_bytes} bytes)")
    return 0


def audit(args: argparse.Namespace, settings: Settings) -> int:
    """Show the newest entries of the audit log."""
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("audit"), {"limit": args.limit})
    heading = ("AGE", "VERDICT", "FROM", "TO", "TYPE", "MESSAGE", "REASON", "WHY")

    def cells(row: Row) -> tuple[object, ...]:
        said = ("verdict", "sender", "recipient", "type", "message_id", "reason", "why")
        return age_of(row["at"]), *(row[name] for name in said)

    return print_rows(args, found, "entries", heading, cells)


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "send": send,
    "broadcast": broadcast,
    "xml": send_xml,
    "drain": drain,
    "peek": peek,
    "clear": clear,
    "export": export,
    "audit": audit,
}
