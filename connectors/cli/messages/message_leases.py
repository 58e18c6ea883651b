"""The actions of `trunkline messages` that take messages, lease them, and end or extend leases."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from connectors.cli.messages.message_arguments import WAIT, lease_argument
from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import name_of, request_id
from connectors.cli.shared.call import Call, Row
from connectors.cli.shared.text_table import fields, print_json
from trunkline_agent.errors import NotFound, Refused
from trunkline_agent.terminal_text import escaped

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
