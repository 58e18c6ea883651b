"""The action `trunkline messages follow`: print the messages of one's own mailbox as they come (DL-14).

**Delivers** each message at least once: its place is stored after it was printed (and marked as read). So a
message is printed again only if the command ends between the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from connectors.cli.shared.actions import Actions, argument, flag, one_of
from connectors.cli.shared.arguments import path
from connectors.cli.shared.call import Call, Row
from connectors.cli.shared.notes import Notes, refuse_without_reader
from trunkline_agent.errors import BackboneUnreachable, UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS

if TYPE_CHECKING:
    from connectors.plumbing.gateway_client.event_stream import EventStream, ServerEvent
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient
    from schemas.settings.settings import Settings

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
ACTIONS: Final = Actions()


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
