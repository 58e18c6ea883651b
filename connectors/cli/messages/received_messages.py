"""The actions of `trunkline messages` that take, lease and follow messages, and end or extend leases (DL-14).

`follow` **delivers** each message at least once: its place is stored after it was printed (and marked as read).
So a message is printed again only if the command ends between the two.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.messages.message_arguments import WAIT, lease_argument
from connectors.cli.shared.actions import Actions, argument, flag, one_of
from connectors.cli.shared.arguments import name_of, path, request_id
from connectors.cli.shared.call import Call, Row
from connectors.cli.shared.text_output import Notes, fields, print_json, refuse_without_reader
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS

if TYPE_CHECKING:
    from connectors.plumbing.gateway_client.event_stream import EventStream, ServerEvent
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient
    from schemas.settings.settings import Settings

_LIMIT: Final = argument("--limit", "at most (default: 100)", type=int, metavar="N")
_LEASE: Final = (
    argument("lease", "the id of the lease, as 'lease' prints it", type=name_of("a lease")),
    argument("message", "the messages", nargs="+", type=name_of("a message")),
)
ACTIONS: Final = Actions()
# A reader of the output, such as a pager, may be slower: then its messages come again.
PRINTED_WITHIN_S: Final = 300
"""The lease of messages that are printed, in seconds."""
_NOT_PRINTED: Final = "the output of the command could not be written"


@ACTIONS.add(
    WAIT,
    _LIMIT,
    request_id("the same drain, and gets the same messages"),
    example="trunkline messages drain --limit 10 --json | jq '.messages[].payload'",
)
def _drain(call: Call) -> int:
    """Take the messages out of your own mailbox, the most urgent first.

    They are leased until they are printed, and given back if they cannot be printed. With --request-id they are
    taken at once, because the same id gets them again.
    """
    if call.request_id is not None:
        found = _taken(call)
        if found["messages"] and not call.json:
            # Printed first, because the reader may stop reading in the middle.
            count, left = len(found["messages"]), found["left"]
            _note(f"{count} taken, {left} left; the same again: --request-id {found['request_id']}")
        return _print_messages(call, found)
    found, leases = _leased_to_print(call)
    with acknowledging(call, leases):
        code = _print_messages(call, found)
    if leases and not call.json:
        _note(f"{len(found['messages'])} taken, {found['left']} left")
    return code


@contextmanager
def acknowledging(call: Call, leases: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Acknowledge leased messages when the block has printed them. Give them back if the output fails.

    `leases` has the ids of the messages by their lease.
    """
    try:
        yield
        sys.stdout.flush()
    except (OSError, KeyboardInterrupt):
        for lease_id, ids in leases.items():
            call.post("messages", "nack", lease_id=lease_id, message_ids=ids, reason=_NOT_PRINTED)
        raise
    for lease_id, ids in leases.items():
        for one in call.post("messages", "ack", lease_id=lease_id, message_ids=ids)["refused"]:
            _note(f"trunkline messages: {one['message_id']} was printed and comes again: {one['message']}")


def _leased_to_print(call: Call) -> tuple[Row, dict[str, list[str]]]:
    """Lease messages for a drain. Return them as one answer, and the ids of the messages by their lease.

    An answer of the gateway is bounded in bytes, so it is asked until there are `call.limit` messages, or none
    is left.
    """
    found = part = _taken(call, lease=PRINTED_WITHIN_S)
    messages, leases = [], {}
    while part["messages"]:
        leases[part["lease_id"]] = [message["id"] for message in part["messages"]]
        for message in part["messages"]:
            del message["attempt"], message["deadline"]
        messages += part["messages"]
        if not part["left"] or len(messages) >= call.limit:
            break
        part = _taken(call, lease=PRINTED_WITHIN_S, limit=call.limit - len(messages), wait=0)
    found.pop("lease_id", None)
    return {**found, "messages": messages, "left": part["left"]}, leases


@ACTIONS.add(
    lease_argument("the duration of the lease, e.g. 5m (default: 60s)", default=60),
    WAIT,
    _LIMIT,
    request_id("the same lease, and gets those of its messages that are still leased"),
    example="trunkline messages lease --for 5m --limit 10 --wait 30s",
)
def _lease(call: Call) -> int:
    """Take messages under a lease: those that are not acknowledged in time are handed out again."""
    found = _taken(call, lease=call.lease_s)
    if found["messages"] and not call.json:
        until = min(message["deadline"] for message in found["messages"])
        _note(f"{len(found['messages'])} leased until {until}, {found['left']} left")
        _note(f"when they are done: trunkline messages ack {found['lease_id']} MESSAGE …")
    return _print_messages(call, found)


def _taken(call: Call, **parameters: int) -> Row:
    """Take messages. Return the gateway's answer, with the id of the request."""
    from connectors.plumbing.gateway_client.gateway_client import path_of

    wanted = {"limit": call.limit, "wait": call.wait, **parameters}
    with call.gateway() as gateway, call.named_request("messages were taken") as request_id:
        # The client repeats a request without an answer. By its name, the gateway hands out the same messages.
        headers = {"X-Request-ID": request_id}
        found = gateway.get(path_of("messages"), wanted, headers=headers, wait_s=call.wait or 0)
    return {**found, "request_id": request_id}


def _note(text: str) -> None:
    print(escaped(text), file=sys.stderr, flush=True)


def _print_messages(call: Call, found: Row) -> int:
    if call.json:
        print_json(found)
        return 0
    if not found["messages"]:
        raise NotFound("no message waits")
    print("\n\n".join(message_text(message) for message in found["messages"]))
    return 0


def message_text(message: Row) -> str:
    """Return the text of a message with one line for each field, without characters that a terminal obeys."""
    # Not limited to ASCII, because people read it; `fields` escapes control characters.
    texts: dict[str, str] = {
        name: json.dumps(message[name], ensure_ascii=False) for name in ("payload", "blob") if name in message
    }
    return fields({**message, **texts})


@ACTIONS.add(*_LEASE, example="trunkline messages ack 7c1e… 5b7e…")
def _ack(call: Call) -> int:
    """Acknowledge leased messages: they are never handed out again."""
    return _end(call, "ack", "acknowledged")


@ACTIONS.add(
    *_LEASE,
    argument("--reason", "why; shown with a message that is dead", metavar="TEXT"),
    example='trunkline messages nack 7c1e… 5b7e… --reason "no disk space"',
)
def _nack(call: Call) -> int:
    """Give leased messages back: they are handed out again at once, or are dead after the last attempt."""
    return _end(call, "nack", "given back", reason=call.reason)


@ACTIONS.add(
    *_LEASE,
    lease_argument("the time from now to the new end of the lease, e.g. 5m", required=True),
    example="trunkline messages extend 7c1e… 5b7e… --for 5m",
)
def _extend(call: Call) -> int:
    """Set a new end for the lease of messages."""
    return _end(call, "extend", "leased for longer", lease=call.lease_s)


def _end(call: Call, how: str, done: str, **more: Any) -> int:
    """Change leased messages, and print the result. The exit code is 4 if some could not be changed."""
    answer = call.post("messages", how, lease_id=call.lease, message_ids=call.message, **more)
    until = f" until {answer['deadline']}" if answer.get("deadline") else ""
    call.print_answer(answer, f"{len(answer['done'])} {done}{escaped(until)}")
    refused: Sequence[dict[str, Any]] = answer["refused"]
    for one in refused:
        _note(f"trunkline messages: {one['message_id']}: {one['message']} ({one['reason']})")
    return Refused.exit_code if refused else 0


_LOOK_S: Final = 1.0
# The gateway marks at most 1000 messages in one request.
_BATCH: Final = 100
_EVENT_ID: Final = re.compile(r"[0-9]{1,18}(?:-[0-9]{1,18})*").fullmatch
_STATE_LIMIT: Final = 100
# The fields of a message that are shown if it has them, and how they are named.
_ABOUT: Final = {
    **{one.name: one.name.replace("_", " ") for one in MESSAGE_FIELDS},
    "topic": "topic",
    "replay_of": "replay of",
}
_NOTES: Final = Notes("messages")


def _event_id(text: str) -> str:
    if _EVENT_ID(text) is None:
        raise UsageError(f"--after: not the id of an event, which --json prints as event_id: {text!r}")
    return text


@ACTIONS.add(
    argument(
        "--url",
        "a gateway; may be repeated: when one is lost, the next goes on (default: gateway.url)",
        action="append",
        metavar="URL",
    ),
    one_of(
        argument(
            "--after", "begin after this event; --json prints it as event_id", type=_event_id, metavar="ID"
        ),
        path("--state", "keep the place in this file, and begin after it", metavar="FILE"),
    ),
    flag("--mark-read", "mark each message as read after it is printed: no drain gets it"),
    example="trunkline messages follow --json --state follow.place | jq .payload",
)
def _follow(call: Call) -> int:
    """Print the messages of your own mailbox as they come, oldest first, until Ctrl-C; take none."""
    from connectors.plumbing.gateway_client.event_stream import EventStream
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of

    after = call.after if call.state is None else _read_place(call.state)
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(GatewayClient(_settings_at(call.settings, url))) for url in call.url or [None]
        ]
        _check_one(gateways)
        events = stack.enter_context(
            EventStream(gateways, path_of("messages", "events"), lost=_NOTES.lost("gateway"), last_id=after)
        )
        marks = _Marks(gateways) if call.mark_read else None
        place = None
        while True:
            found = _next_events(events)
            refuse_without_reader()
            for event in found:
                line = {**event.data, "event_id": event.id} if call.json else _line(event.data)
                print(json.dumps(line, separators=(",", ":")) if call.json else line, flush=True)
                place = event.id
            if marks is not None:
                marks.add([event.data["id"] for event in found])
                if not marks.settle():
                    continue  # the place stays before what is not marked yet
            if call.state is not None and place is not None:
                _write_place(call.state, place)
                place = None


def _settings_at(settings: Settings, url: str | None) -> Settings:
    if url is None:
        return settings
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"url": url})})


def _check_one(gateways: Sequence[GatewayClient]) -> None:
    """Raise BackboneUnreachable if none of the gateways answers."""
    for gateway in gateways[:-1]:
        if gateway.answers():
            return
    gateways[-1].check()


def _next_events(events: EventStream) -> list[ServerEvent]:
    """Return the messages that have come, at most 100. The list is empty if none comes within a second."""
    from connectors.plumbing.gateway_client.event_stream import MESSAGE

    found = []
    event = events.next(_LOOK_S)
    while event is not None:
        if event.name == MESSAGE:
            found.append(event)
        event = events.next(0) if len(found) < _BATCH else None
    return found


class _Marks:
    """The messages that are printed and not yet marked as read."""

    def __init__(self, gateways: Sequence[GatewayClient]) -> None:
        # The one that answered last is asked first.
        self._gateways = list(gateways)
        self._waiting: list[str] = []

    def add(self, message_ids: Sequence[str]) -> None:
        self._waiting += message_ids

    def settle(self) -> bool:
        """Mark the messages, and return whether all are marked. False if no gateway answers now."""
        from connectors.plumbing.gateway_client.gateway_client import path_of

        while self._waiting:
            some = self._waiting[:_BATCH]
            for gateway in list(self._gateways):
                try:
                    answer = gateway.post(path_of("messages", "read"), {"message_ids": some})
                    break
                except BackboneUnreachable:
                    self._gateways.append(self._gateways.pop(0))
            else:
                return False
            if answer["not_marked"]:
                named = ", ".join(answer["not_marked"])
                _NOTES.say(f"not marked as read, because another reader holds or has ended them: {named}")
            del self._waiting[: len(some)]
        return True


def _line(message: Row) -> str:
    """Return a message as one line, without characters that a terminal obeys."""
    about = [f"{text} {message[name]}" for name, text in _ABOUT.items() if name in message]
    payload = json.dumps(message["payload"], ensure_ascii=False)
    parts = (message["timestamp"], message["id"], message["sender"], message["type"], *about, payload)
    return escaped("  ".join(parts))


def _read_place(file: Path) -> str | None:
    """Return the id in a state file, or None if there is no file yet."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(_STATE_LIMIT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"--state: cannot read {file}: {error.strerror}") from None
    text = raw.decode("ascii", "replace").strip()
    if _EVENT_ID(text) is None:
        raise UsageError(
            f"--state: {file} contains no place of a mailbox; delete it to begin with all messages"
        )
    return text


def _write_place(file: Path, event_id: str) -> None:
    following = file.with_name(f"{file.name}.next")
    try:
        following.write_text(f"{event_id}\n", encoding="ascii")
        following.replace(file)
    except OSError as error:
        raise UsageError(f"--state: cannot write {file}: {error.strerror}") from None
