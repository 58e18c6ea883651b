"""Lists and shows rejected records and dead messages, and replays them.

  trunkline dead-letters list --reason bad_signature --since 1d
  trunkline dead-letters show 2/1042                all columns of one; masked parts stay masked
  trunkline dead-letters replay 2/1042 2/1050       append again, unchanged; each gets a new verdict
  trunkline dead-letters messages                   dead messages of all mailboxes (operator)
  trunkline dead-letters messages echo              those of one mailbox, for its owner, too
  trunkline dead-letters replay default/echo/5b7e…  post a dead message again, as a new message

A rejected record has changed nothing. list and show read it from the ledger and need neither gateway nor
brokers; its replay needs Kafka, and prints the new verdict when the gateway answers. A record that is rejected
again is a new row, and the command ends with 4.

A dead message was handed out gateway.max_attempts times and never acknowledged. 'messages' and its replay ask
the gateway, which keeps the newest 100,000 dead ones; the view 'mailbox' has all.
The same command again does not replay it twice; a new --request-id replays it once more.

Exit codes: 0; 2 wrong arguments; 3 nothing found; 4 cannot be replayed, or was rejected again; 5 Kafka or the
gateway does not answer.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.messages.message_arguments import mailbox_argument, mailbox_of
from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import duration, limit, name_of, request_id, stream_key
from connectors.cli.shared.call import Call, Columns
from connectors.cli.shared.text_output import age_of, aligned, fields, print_json
from trunkline_agent.errors import NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.verdicts import DUPLICATE, REASONS, REJECTED

if TYPE_CHECKING:
    from connectors.log.publisher import Publisher
    from connectors.plumbing.gateway_client.event_stream import EventStream
    from schemas.settings.settings import Settings
    from schemas.wire.record import OutgoingRecord, Position

_HIDDEN: Final = ("value_sealed", "entries", "changes")
_SNAPSHOT_S: Final = 5.0
# A message is written as REALM/NAME/ID, a record as PARTITION/OFFSET.
_MESSAGE_SLASHES: Final = 2
_ADDRESS_LIMIT: Final = 400
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("--reason", "only this reason", choices=REASONS, metavar="R"),
    argument("--door", "only records that came by this door, e.g. mqtt", metavar="D"),
    argument("--stream", "only this stream, e.g. job/0a1b2c3d", type=stream_key, metavar="KIND/ID"),
    duration("--since", "only of the last 2h, 1d, …"),
    limit(20),
)
def _list(call: Call) -> int:
    """List the newest rejected records, the oldest of them first."""
    # Imported here, because Arrow is slow to import and help must be quick.
    from connectors.log.ledger_files.ledger_export import iso_time, json_line
    from connectors.log.ledger_files.ledger_replay import dead_letters

    if call.limit < 1:
        raise UsageError("--limit: expected 1 or more")
    try:
        since = None if call.since is None else datetime.now(UTC) - timedelta(seconds=call.since)
    except OverflowError:
        raise UsageError("--since: nothing is that old") from None
    wanted = {"reason": call.reason, "door": call.door, "stream": call.stream, "since": since}
    found = dead_letters(call.settings, call.limit, **wanted)
    if call.json:
        for row in found:
            print(json_line(row))
        return 0
    if not found:
        raise NotFound("there is no such dead letter")
    rows = [
        (f"{r['partition']}/{r['offset']}", iso_time(r["logged_at"], "milliseconds"),
         f"{r['stream_kind']}/{r['stream_id']}", r["door"], r["reason"], r["why"])
        for r in found
    ]  # fmt: skip
    print(aligned(("POSITION", "TIME (UTC)", "STREAM", "DOOR", "REASON", "WHY"), rows))
    return 0


@ACTIONS.add(argument("position", "the place in the log", metavar="PARTITION/OFFSET"))
def _show(call: Call) -> int:
    """Show all columns of a rejected record that may be shown."""
    from connectors.log.ledger_files.ledger_export import iso_time, json_line
    from connectors.log.ledger_files.ledger_replay import ledger_row_at, parse_position

    row = ledger_row_at(call.settings, parse_position(call.position))
    if row["verdict"] != REJECTED:
        raise NotFound(f"{call.position} is no dead letter: it is {row['verdict']}")
    shown: dict[str, Any] = {name: value for name, value in row.items() if name not in _HIDDEN}
    if call.json:
        print(json_line(shown))
        return 0
    for name, value in shown.items():
        if isinstance(value, bytes):
            shown[name] = value.decode("utf-8", "backslashreplace")
        elif isinstance(value, datetime):
            shown[name] = iso_time(value, "microseconds")
    print(fields(shown))
    return 0


_DEAD_COLUMNS: Final[Columns] = {
    "MESSAGE": lambda row: "{realm}/{recipient}/{message_id}".format(**row),
    "DEAD FOR": lambda row: age_of(row["ended_at"]),
    "FROM": lambda row: row["sender"] if row["from_verified"] else f"{row['sender']} (not verified)",
    "TYPE": "kind",
    "ATTEMPTS": "attempts",
    "LAST READER": "handed_to",
    "LAST REASON": "last_reason",
}


@ACTIONS.add(
    mailbox_argument(" (default: all mailboxes)", nargs="?"),
    limit(20),
    example="trunkline dead-letters messages default/echo",
)
def _messages(call: Call) -> int:
    """List the newest dead messages of one mailbox or of all, the oldest of them first."""
    if call.mailbox is None:
        found = call.get("messages", "dead", limit=call.limit)
    else:
        found = call.get("mailboxes", *mailbox_of(call.mailbox), status="dead", limit=call.limit)
    # The first column is what 'replay' takes, so it is not cut.
    return call.print_rows(found, "messages", _DEAD_COLUMNS, cell_limit=_ADDRESS_LIMIT)


@ACTIONS.add(
    argument(
        "what",
        "a record's place in the log, or a dead message",
        metavar="PARTITION/OFFSET|REALM/NAME/ID",
        nargs="+",
    ),
    request_id("the same replay of a message; a new name replays it once more"),
    example="trunkline dead-letters replay default/echo/5b7e…",
)
def _replay(call: Call) -> int:
    """Append one or several records again, or post dead messages again.

    All records are checked before the first is appended.
    """
    messages = [text for text in dict.fromkeys(call.what) if text.count("/") == _MESSAGE_SLASHES]
    addresses = [_address(text) for text in messages]
    records = [text for text in call.what if text not in messages]
    code = _replay_records(call, records) if records else 0
    for address in addresses:
        _replay_message(call, address)
    return code


def _address(text: str) -> tuple[str, str, str]:
    realm, name, message_id = text.split("/")
    for part, what in ((realm, "a realm"), (name, "a mailbox"), (message_id, "a message")):
        name_of(what)(part)
    return realm, name, message_id


def _replay_message(call: Call, address: tuple[str, str, str]) -> None:
    from connectors.plumbing.gateway_client.gateway_client import path_of

    realm, name, message_id = address
    # Without a key the gateway replays a message once, so that a repeated command does not double it.
    headers = {} if call.request_id is None else {"Idempotency-Key": call.request_id}
    path = path_of("mailboxes", realm, name, "messages", message_id, "replay")
    with call.gateway() as gateway:
        response = gateway.request("POST", path, headers=headers)
        answer, verdict = response.json(), response.headers.get("trunkline-verdict")
    if call.json:
        print_json({"replayed": "/".join(address), "message_id": answer["message_id"], "verdict": verdict})
        return
    new_id = escaped(answer["message_id"])
    again = f"was replayed before, as {new_id}; a new --request-id replays it once more"
    print(f"{'/'.join(address)} {again if verdict == DUPLICATE else f'is posted again as {new_id}'}")


def _replay_records(call: Call, texts: list[str]) -> int:
    from connectors.log.ledger_files.ledger_replay import ledger_row_at, parse_position, replayable
    from connectors.log.publisher import Publisher
    from schemas.keys.sealing import load_keyring
    from schemas.log_access.event_topic import check_topic

    positions = list(dict.fromkeys(parse_position(text) for text in texts))
    keyring = load_keyring(call.settings)
    records = [(place, replayable(ledger_row_at(call.settings, place), keyring)) for place in positions]
    check_topic(call.settings)
    code = 0
    with Publisher(call.settings) as publisher:
        for place, record in records:
            result = _replay_one(call.settings, publisher, record)
            if result["verdict"] == REJECTED:
                code = Refused.exit_code
            if call.json:
                print_json({"replayed": list(place), **result})
            else:
                new = "{}/{}".format(*result["position"])
                reason = "" if result["reason"] is None else f", {result['reason']}: {result['why']}"
                verdict = f"{result['verdict']}{reason}" if result["verdict"] else "not settled while we looked"
                print(f"{place.partition}/{place.offset} is at {new} again: {escaped(verdict)}")
    return code


def _replay_one(settings: Settings, publisher: Publisher, record: OutgoingRecord) -> dict[str, Any]:
    """Append a record. Return its new position, and its verdict if the gateway reports one in time."""
    from connectors.plumbing.gateway_client.event_stream import EventStream
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of

    with ExitStack() as stack:
        stream = None
        try:
            gateway = stack.enter_context(GatewayClient(settings))
            if gateway.answers():
                path, parameters = path_of("events"), {"stream": record.stream}
                stream = stack.enter_context(EventStream(gateway, path, parameters, give_up_s=_SNAPSHOT_S))
                # The stream is open before the record is appended, so its verdict cannot be missed.
                if stream.next(_SNAPSHOT_S) is None:
                    stream = None
        except TrunklineError as error:
            print(f"trunkline dead-letters: no verdict will be shown: {error}", file=sys.stderr)
            stream = None
        position = publisher.append(record).result()
        found: dict[str, Any] = {"position": list(position), "verdict": None, "reason": None, "why": None}
        if stream is not None:
            found |= _verdict(stream, position, settings.gateway.settle_timeout_s)
        return found


def _verdict(stream: EventStream, position: Position, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            event = stream.next(left)
            if event is not None and event.name == "settled" and event.data["position"] == list(position):
                return {name: event.data[name] for name in ("verdict", "reason", "why")}
    except TrunklineError as error:
        print(f"trunkline dead-letters: the verdict is not known: {error}", file=sys.stderr)
    return {}
