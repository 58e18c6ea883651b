"""What `trunkline messages` does for each action."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.given_content import STANDARD_INPUT, read_given
from connectors.cli.hub_options import named_request
from connectors.cli.hub_rows import Row, checked_name, print_rows
from connectors.cli.jobs_actions import print_json
from connectors.cli.text_table import age_of, fields
from connectors.gateway_client import GatewayClient, path_of
from connectors.terminal_text import escaped
from schemas.errors import NotFound, UsageError
from schemas.strict_json import MalformedJsonError, decode

if TYPE_CHECKING:
    from schemas.settings import Settings

_DEFAULT_REALM: Final = "default"
_FILE_MARK: Final = "@"


def send(args: argparse.Namespace, settings: Settings) -> int:
    """Send a message."""
    if args.text is not None and args.payload is not None:
        raise UsageError("give PAYLOAD or --text, not both")
    payload = {"text": args.text} if args.text is not None else _payload(args.payload, settings)
    body = {"recipient": args.recipient, "type": args.type, "payload": payload}
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
    realm, slash, name = args.mailbox.rpartition("/")
    if not slash:
        realm = _DEFAULT_REALM
    path = path_of("mailboxes", checked_name(realm, "a realm"), checked_name(name, "a mailbox"))
    with GatewayClient(settings) as gateway:
        found = gateway.get(path, {"limit": args.limit})
    heading = ("MESSAGE", "STATE", "AGE", "FROM", "TYPE", "PRIORITY", "TAKEN BY", "BODY")

    def cells(row: Row) -> tuple[object, ...]:
        sender = row["sender"] if row["from_verified"] else f"{row['sender']} (not verified)"
        age = age_of(row["posted_at"])
        said = (row[name] for name in ("kind", "priority", "handed_to", "body"))
        return row["message_id"], row["status"], age, sender, *said

    return print_rows(args, found, "messages", heading, cells)


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
    "drain": drain,
    "peek": peek,
    "audit": audit,
}
