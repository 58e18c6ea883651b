"""Reads the dashboard's events as a script would."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

EVENTS = "/api/events"
WITHIN_S = 20.0


class Event(NamedTuple):
    """One event; `id` is None for those that are not the last of their frame."""

    name: str
    id: str | None
    data: Any


@contextmanager
def followed(client: httpx.Client, last_event_id: str | None = None) -> Iterator[Events]:
    """The events of one connection."""
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    with client.stream("GET", EVENTS, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        yield Events(answer)


class Events:
    """The events of one connection. The time limit counts from the last call of `wait`."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.iter_lines()
        self.wait()

    def wait(self) -> None:
        """From now on, something else is waited for."""
        self._deadline = time.monotonic() + WITHIN_S

    def __iter__(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        for line in self._lines:
            assert time.monotonic() < self._deadline, "what was waited for did not come"
            if not line:
                if "data" in fields:
                    yield Event(fields["event"], fields.get("id"), json.loads(fields["data"]))
                fields = {}
                continue
            name, _, value = line.partition(": ")
            fields[name] = value


class Seen:
    """The events so far, without the pulses; `until` reads on."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.events: list[Event] = []
        self.last_id: str | None = None

    def until(self, enough: Callable[[Seen], Any]) -> Seen:
        """Read until there is enough, to the end of that frame."""
        self._events.wait()
        for event in self._events:
            if event.name != "pulse":
                self.events.append(event)
            self.last_id = event.id or self.last_id
            if event.id is not None and enough(self):
                return self
        raise AssertionError(f"the stream ended after {self.events}")

    def of(self, name: str) -> list[Any]:
        """All that events of this name told, one after the other."""
        return [one for event in self.events if event.name == name for one in event.data]

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Where the records are that verdicts came for."""
        return [tuple(verdict["position"]) for verdict in self.of("verdict")]

    def names(self) -> list[str]:
        """The names of the events, in order."""
        return [event.name for event in self.events]

    def told_jobs(self) -> list[str]:
        """The jobs that verdicts came for, in order. Gateways declare their agents whenever they come to it, so
        there may be verdicts between them.
        """
        streams = (verdict["stream"] for verdict in self.of("verdict"))
        return [stream.removeprefix("job/") for stream in streams if stream.startswith("job/")]
