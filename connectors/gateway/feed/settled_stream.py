"""The settled records as those who follow see them: server-sent events, and lines of verdicts for the bridge.

A follower has a cursor in the feed and nothing else. One that falls behind what is in memory gets an event
`gap` and the end of its stream; it comes again and gets a snapshot.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from connectors.gateway.web.answers import iso_moment, row_as_json
from connectors.live.live_view import LiveView
from connectors.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from schemas.fold.life_cycles import JOB_TERMINAL, TERMINATED
from schemas.fold.view_rows import REGISTRY_JOBS, REGISTRY_SESSIONS, JobRow, Row, SessionRow
from schemas.wire.ids import JOB, PRINCIPAL, SESSION
from schemas.wire.record import (
    AGENT_JOINED,
    AGENT_MQTT_REGISTERED,
    AGENT_SAID,
    AGENT_STOPPED,
    AGENT_UPDATED,
    JOB_EVENT,
    JOB_REGISTERED,
    JOB_SECRET_ROTATED,
)
from schemas.wire.strict_json import MalformedJsonError, decode
from schemas.wire.verdicts import ACCEPTED

PING_S: Final = 15.0
TICK_S: Final = 0.5
SNAPSHOT_ROWS: Final = 1000
_BATCH: Final = 200
# What comes right after something else goes to a client together: with 500 records a second each follower was a
# tenth of what the gateway does. Not to the bridge, at which senders wait.
_TOGETHER_S: Final = 0.01
_RENDERED: Final = 2000
# What those see who may read jobs and sessions, but not everybody's mail and tokens.
PUBLIC_KINDS: Final = frozenset({JOB, SESSION})
# What subscribers call a change of the registry of agents (AM-06), by the record that made it.
AGENT_CREATED, AGENT_CHANGED, AGENT_REMOVED = "agent:created", "agent:updated", "agent:removed"
AGENT_EVENTS: Final = {AGENT_JOINED: AGENT_CREATED, AGENT_UPDATED: AGENT_CHANGED, AGENT_STOPPED: AGENT_REMOVED}
# What comes by MQTT, whose senders get receipts.
_RECEIPTED: Final = frozenset({JOB_EVENT, AGENT_SAID})


@dataclass(frozen=True)
class Wanted:
    """What a follower wants to see: what fits every field that is given."""

    kinds: frozenset[str] | None = None
    stream: str | None = None
    type: str | None = None
    verdict: str | None = None

    def fits(self, record: SettledRecord) -> bool:
        """Whether the follower sees this record."""
        return (
            (self.stream is None or record.stream == self.stream)
            and (self.kinds is None or record.stream.partition("/")[0] in self.kinds)
            and (self.type is None or record.type == self.type)
            and (self.verdict is None or record.verdict == self.verdict)
        )


@dataclass(frozen=True)
class Follower:
    """How a stream goes on: until the gateway stops, or the caller's token is not good any more."""

    feed: SettledFeed
    goes_on: Callable[[], bool]

    async def batches(
        self, cursor: int, ping_s: float, together_s: float = 0.0
    ) -> AsyncIterator[tuple[int, list[SettledRecord]]]:
        """The records after `cursor`, each batch with the cursor before it; an empty one every `ping_s`
        seconds of silence. What comes after a silence comes at once, then as much as `together_s` bring.

        Raises FellBehind.
        """
        silent_since = time.monotonic()
        while self.goes_on():
            records, after = self.feed.since(cursor, _BATCH)
            if records:
                yield cursor, records
                cursor, silent_since = after, time.monotonic()
                if together_s and len(records) < _BATCH:
                    await asyncio.sleep(together_s)
                continue
            if time.monotonic() - silent_since >= ping_s:
                yield cursor, []
                silent_since = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S, ping_s)):
                    await self.feed.wait_beyond(cursor)


class EventWriter:
    """Writes server-sent events; one record is written once for all followers. For the event loop alone.

    `agent(name)`: what to show of an agent that takes part, as it is now.
    """

    def __init__(self, boot_id: str, agent: Callable[[str], Any]) -> None:
        self._boot_id = boot_id
        self._agent = agent
        self._rendered: OrderedDict[int, bytes] = OrderedDict()

    def cursor_of(self, last_event_id: str, feed: SettledFeed) -> int | None:
        """The cursor in a `Last-Event-ID` of this process whose successors are still in memory, else None."""
        boot_id, _, number = last_event_id.rpartition("-")
        if boot_id != self._boot_id or not number.isdecimal() or len(number) > 18:
            return None
        cursor = int(number)
        if cursor > feed.newest:
            return None
        try:
            feed.since(cursor, 0)
        except FellBehind:
            return None
        return cursor

    def event(self, name: str, cursor: int, data: Any) -> bytes:
        """One event."""
        return self._frame(name, cursor, orjson.dumps(data))

    def settled(self, cursor: int, record: SettledRecord) -> bytes:
        """Return the event `settled` of the record that the feed has under `cursor`; before it, for a change of
        the registry of agents, the event of that change.
        """
        found = self._rendered.get(cursor)
        if found is None:
            settled = self._frame("settled", cursor, orjson.dumps(settled_as_json(record)))
            found = self._rendered[cursor] = self._agent_event(cursor, record) + settled
            if len(self._rendered) > _RENDERED:
                self._rendered.popitem(last=False)
        return found

    def _agent_event(self, cursor: int, record: SettledRecord) -> bytes:
        name = AGENT_EVENTS.get(record.type or "") if record.verdict == ACCEPTED else None
        if name is None:
            return b""
        # With the id of what came before: a follower that is cut off behind it gets both events again.
        return self._frame(name, cursor - 1, orjson.dumps(self._agent(record.stream.partition("/")[2])))

    def _frame(self, name: str, cursor: int, data: bytes) -> bytes:
        # orjson escapes line breaks, so the data is one line.
        return b"event: %b\nid: %b-%d\ndata: %b\n\n" % (name.encode(), self._boot_id.encode(), cursor, data)


async def server_events(
    writer: EventWriter, follower: Follower, wanted: Wanted, last_event_id: str | None, rows: Callable[[], Any]
) -> AsyncIterator[bytes]:
    """The whole stream of one follower: `snapshot` (with `gap` before it if something was missed), or, for
    one that comes again in time, what it missed; then what is settled, with pings.
    """
    cursor = None if last_event_id is None else writer.cursor_of(last_event_id, follower.feed)
    if cursor is None:
        # The cursor is taken before the rows: what is settled in between comes twice, not never.
        cursor = follower.feed.newest
        if last_event_id is not None:
            yield writer.event("gap", cursor, {"why": "what came after the last event is not in memory"})
        yield writer.event("snapshot", cursor, await asyncio.to_thread(rows))
    try:
        async for before, records in follower.batches(cursor, PING_S, _TOGETHER_S):
            cursor = before + len(records)
            shown = [
                writer.settled(number, record)
                for number, record in enumerate(records, before + 1)
                if wanted.fits(record)
            ]
            if shown or not records:
                yield b"".join(shown) or b": ping\n\n"
    except FellBehind:
        yield writer.event("gap", cursor, {"why": "too slow: what comes next is not in memory any more"})


async def verdict_lines(follower: Follower) -> AsyncIterator[bytes]:
    """Lines of JSON: the verdicts on what comes by MQTT from now on, `{}` at least every second."""
    cursor = follower.feed.newest
    yield b"{}\n"
    with suppress(FellBehind):
        async for _, records in follower.batches(cursor, TICK_S):
            found = [[*r.position, r.verdict, r.reason] for r in records if r.type in _RECEIPTED]
            yield orjson.dumps({"settled": found}) + b"\n" if found else b"{}\n"


def settled_as_json(record: SettledRecord) -> dict[str, Any]:
    """A settled record as followers see it; sealed secrets and token hashes stay out."""
    return {
        "position": list(record.position),
        "stream": record.stream,
        "type": record.type,
        "ce_id": record.ce_id,
        "principal": record.principal,
        "verdict": record.verdict,
        "reason": record.reason,
        "why": record.why,
        "late": record.late,
        "seq": record.seq,
        "status_after": record.status_after,
        "logged_at": iso_moment(record.logged_at_us),
        "body": _shown_body(record),
    }


def _shown_body(record: SettledRecord) -> Any:
    if record.value is None:
        return None
    try:
        body, _ = decode(record.value)
    except MalformedJsonError:
        return None
    if not isinstance(body, dict):
        return None
    if record.stream.startswith(f"{PRINCIPAL}/"):
        body.pop("token_sha256", None)
    if record.type in (JOB_REGISTERED, JOB_SECRET_ROTATED, AGENT_MQTT_REGISTERED):
        body.pop("sealed_secret", None)
        if isinstance(body.get("broker"), dict):
            body["broker"].pop("sealed_password", None)
    return body


def snapshot_rows(live_view: LiveView, wanted: Wanted) -> dict[str, Any]:
    """The rows of jobs and sessions that fit, at most 1,000 of each: those that have not ended first, then
    the newest. `total` says how many there are.
    """
    rows: dict[str, list[Any]] = {}
    total: dict[str, int] = {}
    for kind, view in ((JOB, REGISTRY_JOBS), (SESSION, REGISTRY_SESSIONS)):
        if wanted.kinds is None or kind in wanted.kinds:
            found = _of_stream(live_view, kind, view, wanted.stream)
            rows[view] = [row_as_json(row) for row in heapq.nlargest(SNAPSHOT_ROWS, found, key=_importance)]
            total[view] = len(found)
    return {"rows": rows, "total": total}


def _of_stream(live_view: LiveView, kind: str, view: str, stream: str | None) -> list[Row]:
    if stream is None:
        return live_view.rows(view)
    row = live_view.row(view, stream.removeprefix(f"{kind}/"))
    return [] if row is None or not stream.startswith(f"{kind}/") else [row]


def _importance(row: Row) -> tuple[bool, int]:
    if isinstance(row, JobRow):
        return row.status not in JOB_TERMINAL, row.registered_at
    if isinstance(row, SessionRow):
        return row.status != TERMINATED, row.created_at
    return False, 0


def kinds_for(role_sees_all: bool, asked: str | None) -> frozenset[str] | None:
    """The kinds of stream that a follower sees: what it asks for, of what it may see. None: all."""
    if asked is None:
        return None if role_sees_all else PUBLIC_KINDS
    return frozenset({asked}) if role_sees_all else frozenset({asked}) & PUBLIC_KINDS
