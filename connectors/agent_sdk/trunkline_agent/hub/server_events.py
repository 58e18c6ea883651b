"""Server-sent events from the bytes of a stream, as the standard of HTML describes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from trunkline_agent.errors import TrunklineError

_EVENT_BYTES_MOST: Final = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event.

    Attributes:
        name: Its name.
        data: Its text.
        id: The id from which a later stream goes on (`Last-Event-ID`), None without one.
    """

    name: str
    data: str
    id: str | None

    def json(self) -> Any:
        """Return the JSON of the data as Python values. Raises TrunklineError if it is not JSON."""
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            raise TrunklineError(
                "the stream is not that of a Trunkline gateway", reason="not_a_gateway"
            ) from None


class EventParser:
    """A parser of a stream's bytes into events. Comments, which keep a silent stream alive, are left out."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0
        self._end = b""

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Take more bytes, and return the events that are complete now.

        Raises:
            TrunklineError: An event is longer than 128 MiB.
        """
        self._parts.append(data)
        self._bytes += len(data)
        # The bytes that a blank line across two parts has in the earlier one.
        near = self._end + data
        self._end = near[-3:]
        if b"\n\n" not in near and b"\n\r\n" not in near:
            # A long event comes in many parts, which are joined once.
            if self._bytes > _EVENT_BYTES_MOST:
                raise TrunklineError(f"an event of the stream has more than {_EVENT_BYTES_MOST} bytes")
            return []
        *blocks, rest = b"".join(self._parts).replace(b"\r\n", b"\n").split(b"\n\n")
        self._parts, self._bytes = [rest], len(rest)
        return [event for event in map(_event_of, blocks) if event is not None]


def _event_of(block: bytes) -> ServerEvent | None:
    name, event_id, data = "message", None, []
    for line in block.decode("utf-8", "replace").split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            event_id = value
    return ServerEvent(name or "message", "\n".join(data), event_id) if data else None
