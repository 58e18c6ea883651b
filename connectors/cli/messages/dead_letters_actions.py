"""What `trunkline dead-letters` does for each action."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from connectors.cli.shared.text_table import aligned, fields, print_json
from connectors.ledger_files.ledger_lines import iso_time, json_line
from connectors.ledger_files.ledger_replay import dead_letters, ledger_row_at, parse_position, replayable
from connectors.log.publisher import Position, Publisher
from connectors.terminal.terminal_text import escaped
from schemas.errors import NotFound, Refused, TrunklineError, UsageError
from schemas.keys.sealing import load_keyring
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings
from schemas.wire.ids import parse_stream_key
from schemas.wire.record import OutgoingRecord
from schemas.wire.verdicts import REJECTED

_HIDDEN: Final = ("value_sealed", "entries", "changes")
_SNAPSHOT_S: Final = 5.0


def list_letters(args: argparse.Namespace, settings: Settings) -> int:
    """Print the newest rejections that fit."""
    if args.limit < 1:
        raise UsageError("--limit: expected 1 or more")
    stream = None
    if args.stream is not None:
        stream = parse_stream_key(args.stream.encode("utf-8", "surrogateescape"))
        if stream is None:
            raise UsageError(f"--stream: expected KIND/ID such as refused/mqtt: {args.stream!r}")
    try:
        since = None if args.since is None else datetime.now(UTC) - timedelta(seconds=args.since)
    except OverflowError:
        raise UsageError("--since: nothing is that old") from None
    found = dead_letters(settings, args.limit, reason=args.reason, door=args.door, stream=stream, since=since)
    if args.json:
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


def show(args: argparse.Namespace, settings: Settings) -> int:
    """Print all that may be shown of one."""
    row = ledger_row_at(settings, parse_position(args.position))
    if row["verdict"] != REJECTED:
        raise NotFound(f"{args.position} is no dead letter: it is {row['verdict']}")
    if args.json:
        print(json_line({name: value for name, value in row.items() if name not in _HIDDEN}))
        return 0
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if name in _HIDDEN:
            continue
        if isinstance(value, bytes):
            value = value.decode("utf-8", "backslashreplace")
        shown[name] = iso_time(value, "microseconds") if isinstance(value, datetime) else value
    print(fields(shown))
    return 0


def replay(args: argparse.Namespace, settings: Settings) -> int:
    """Append each again; all are looked at before the first is sent."""
    positions = list(dict.fromkeys(parse_position(text) for text in args.positions))
    keyring = load_keyring(settings)
    records = [(place, replayable(ledger_row_at(settings, place), keyring)) for place in positions]
    check_topic(settings)
    code = 0
    with Publisher(settings) as publisher:
        for place, record in records:
            told = _replay_one(settings, publisher, record)
            if told["verdict"] == REJECTED:
                code = Refused.exit_code
            if args.json:
                print_json({"replayed": list(place), **told})
            else:
                new = "{}/{}".format(*told["position"])
                reason = "" if told["reason"] is None else f", {told['reason']}: {told['why']}"
                verdict = f"{told['verdict']}{reason}" if told["verdict"] else "not settled while we looked"
                print(f"{place.partition}/{place.offset} is at {new} again: {escaped(verdict)}")
    return code


def _replay_one(settings: Settings, publisher: Publisher, record: OutgoingRecord) -> dict[str, Any]:
    """Where the record lies now, and its verdict as far as the gateway tells it in time."""
    from connectors.gateway_client.event_stream import EventStream
    from connectors.gateway_client.gateway_client import GatewayClient, path_of

    with ExitStack() as stack:
        stream = None
        try:
            gateway = stack.enter_context(GatewayClient(settings))
            if gateway.answers():
                path, parameters = path_of("events"), {"stream": record.stream}
                stream = stack.enter_context(EventStream(gateway, path, parameters, give_up_s=_SNAPSHOT_S))
                # Listening before the record is appended: its verdict cannot be missed.
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


def _verdict(stream: Any, position: Position, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            event = stream.next(left)
            if event is not None and event.name == "settled" and event.data["position"] == list(position):
                return {name: event.data[name] for name in ("verdict", "reason", "why")}
    except TrunklineError as error:
        print(f"trunkline dead-letters: the verdict is not known: {error}", file=sys.stderr)
    return {}


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "list": list_letters,
    "show": show,
    "replay": replay,
}
