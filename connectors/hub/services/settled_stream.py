"""Streams of settled records over HTTP: server-sent events for clients.

The state of a stream is a cursor in the feed of settled records. A client that falls behind the records in
memory gets the event `gap` and the end of its stream. When it reconnects, it gets a snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import OrderedRows, RowLists
from connectors.hub.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from connectors.hub.serving.answers import row_as_json
from connectors.hub.serving.streaming_answer import CHUNK_BYTES, PING, Reserve, server_event
from schemas.streams.agents.agent_registry import AGENT_JOINED, AGENT_STOPPED, AGENT_UPDATED
from schemas.streams.agents.mqtt_agents import AGENT_MQTT_REGISTERED
from schemas.streams.job.job_registry import (
    JOB_REGISTERED,
    JOB_SECRET_ROTATED,
    JOB_STATES,
    JOB_TERMINAL,
    JobRow,
)
from schemas.streams.session.sessions import SESSION_STATES, TERMINATED, SessionRow
from schemas.streams.webhook.webhooks import WEBHOOK_SET
from trunkline_agent.wire.ids import JOB, PRINCIPAL, SESSION
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import ACCEPTED

PING_S: Final = 15.0
TICK_S: Final = 0.5
SNAPSHOT_ROWS: Final = 1000
# The most bytes of the rows of a snapshot.
SNAPSHOT_BYTES: Final = 8 * 1024 * 1024
_BATCH: Final = 200
# Records that come right after others are sent together. At 500 records a second each client cost a tenth of
# the gateway's processor time. The bridge gets each record at once, because senders wait for its receipts.
_TOGETHER_S: Final = 0.01
_RENDERED: Final = 2000
_RENDERED_BYTES: Final = 16 * 1024 * 1024
_LIVE_JOBS: Final = [state for state in JOB_STATES if state not in JOB_TERMINAL]
_LIVE_SESSIONS: Final = [state for state in SESSION_STATES if state != TERMINATED]
# The kinds of stream that every reader of jobs and sessions may see, unlike mailboxes and tokens.
PUBLIC_KINDS: Final = frozenset({JOB, SESSION})
# The events of changes of the agent registry (AM-06), by the type of the record.
AGENT_CREATED, AGENT_CHANGED, AGENT_REMOVED = "agent:created", "agent:updated", "agent:removed"
AGENT_EVENTS: Final = {AGENT_JOINED: AGENT_CREATED, AGENT_UPDATED: AGENT_CHANGED, AGENT_STOPPED: AGENT_REMOVED}
_SHOWN: Final = ("type", "ce_id", "principal", "verdict", "reason", "why", "late", "seq", "status_after")


@dataclass(frozen=True)
class Wanted:
    """A filter of settled records: a record must match every field that is not None."""

    kinds: frozenset[str] | None = None
    stream: str | None = None
    types: frozenset[str] | None = None
    verdict: str | None = None

    def fits(self, record: SettledRecord) -> bool:
        """Return whether a record matches every field of this filter that is not None."""
        return (
            (self.stream is None or record.stream == self.stream)
            and (self.kinds is None or record.stream.partition("/")[0] in self.kinds)
            and (self.types is None or record.type in self.types)
            and (self.verdict is None or record.verdict == self.verdict)
        )


@dataclass(frozen=True)
class Follower:
    """A reader of the settled records in memory.

    Attributes:
        feed: The settled records that the live view has in memory.
        goes_on: Called at least twice a second. Reading ends when it returns False, because the gateway stops
            or the client's token is no longer valid.
    """

    feed: SettledFeed
    goes_on: Callable[[], bool]

    async def batches(
        self, cursor: int, ping_s: float, together_s: float = 0.0
    ) -> AsyncIterator[tuple[int, list[SettledRecord]]]:
        """Yield pairs of a cursor and the batch of settled records that follows it in the feed.

        The generator waits for new records, and ends when `goes_on` returns False.

        Args:
            cursor: The position in the feed after which to start, such as `feed.newest` for only later records.
            ping_s: After this many seconds without a record, an empty batch is yielded.
            together_s: How many seconds to wait after a batch, so that the next one has more records.

        Raises:
            FellBehind: The feed has dropped records after the cursor from memory.
        """
        silent_since = time.monotonic()
        while self.goes_on():
            records, after = self.feed.since(cursor, _BATCH, CHUNK_BYTES)
            if records:
                is_all = after >= self.feed.newest
                yield cursor, records
                cursor, silent_since = after, time.monotonic()
                if together_s and is_all:
                    await asyncio.sleep(together_s)
                continue
            if time.monotonic() - silent_since >= ping_s:
                yield cursor, []
                silent_since = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S, ping_s)):
                    await self.feed.wait_beyond(cursor)


class EventWriter:
    """Formats server-sent events. The bytes of a record are made once for all clients. Not thread-safe.

    Args:
        boot_id: The id of this process. It is a part of the event ids.
        agent: Returns the present JSON of the participant with this name, or None for an unknown name.
    """

    def __init__(self, boot_id: str, agent: Callable[[str], Any]) -> None:
        self._boot_id = boot_id
        self._agent = agent
        self._rendered: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def cursor_of(self, last_event_id: str, feed: SettledFeed) -> int | None:
        """Return the feed's cursor of the event with this id, from which a client continues its stream.

        `last_event_id` is the header `Last-Event-ID`. Returns None if the text is invalid, another process sent
        the event, or records after the event are no longer in memory. The client then needs a snapshot.
        """
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
        """Return the bytes of one server-sent event with this name and with `data` as JSON.

        The event's id is made of the process's id and `cursor`, a position in the feed.
        """
        return server_event(name, f"{self._boot_id}-{cursor}", orjson.dumps(data))

    def settled(self, cursor: int, record: SettledRecord) -> bytes:
        """Return the bytes of the event `settled` for a record. `cursor` is the record's position in the feed.

        If the record has changed a participant, another event precedes it: `agent:created`, `agent:updated` or
        `agent:removed`, with the participant's present state.
        """
        found = self._rendered.get(cursor)
        if found is None:
            settled = self.event("settled", cursor, settled_as_json(record))
            found = self._rendered[cursor] = self._agent_event(cursor, record) + settled
            self._bytes += len(found)
            while len(self._rendered) > _RENDERED or self._bytes > _RENDERED_BYTES:
                self._bytes -= len(self._rendered.popitem(last=False)[1])
        return found

    def _agent_event(self, cursor: int, record: SettledRecord) -> bytes:
        name = AGENT_EVENTS.get(record.type or "") if record.verdict == ACCEPTED else None
        if name is None:
            return b""
        # It has the id of the previous event, so that a client that is cut off after it gets both events again.
        return self.event(name, cursor - 1, self._agent(record.stream.partition("/")[2]))


async def server_events(
    writer: EventWriter,
    follower: Follower,
    wanted: Wanted,
    last_event_id: str | None,
    rows: Callable[[], Any],
    reserve: Reserve,
) -> AsyncIterator[bytes]:
    """Yield the bytes of one client's event stream: a snapshot, then settled records, with pings.

    A client that reconnects gets the events that it missed instead of the snapshot. If some are no longer in
    memory, it gets the event `gap` and then the snapshot. If a client becomes too slow, it gets `gap`, and its
    stream ends. The stream also ends when `follower.goes_on` returns False.

    Args:
        writer: Formats the events.
        follower: Reads the settled records.
        wanted: The filter of the records.
        last_event_id: The id of the last event that the client received before; None for a new client.
        rows: Returns the data of the snapshot. It is called in a thread.
        reserve: Waits for the memory of a chunk.
    """
    cursor = None if last_event_id is None else writer.cursor_of(last_event_id, follower.feed)
    if cursor is None:
        # The cursor is taken before the rows, so a record settled in between comes twice instead of never.
        cursor = follower.feed.newest
        if last_event_id is not None:
            yield writer.event("gap", cursor, {"why": "what came after the last event is not in memory"})
        await reserve(SNAPSHOT_BYTES)
        yield writer.event("snapshot", cursor, await asyncio.to_thread(rows))
    try:
        async for before, records in follower.batches(cursor, PING_S, _TOGETHER_S):
            cursor = before + len(records)
            fit = [(number, one) for number, one in enumerate(records, before + 1) if wanted.fits(one)]
            await reserve(sum(len(one.value or b"") for _, one in fit))
            if fit or not records:
                yield b"".join(writer.settled(number, one) for number, one in fit) or PING
    except FellBehind:
        yield writer.event("gap", cursor, {"why": "too slow: what comes next is not in memory any more"})


def settled_as_json(record: SettledRecord) -> dict[str, Any]:
    """Return a settled record as JSON with its body, without sealed secrets and token hashes.

    `body` is None if the record has no value, or the value is not a JSON object.
    """
    return {
        "position": list(record.position),
        "stream": record.stream,
        **{name: getattr(record, name) for name in _SHOWN},
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
    if record.type in (JOB_REGISTERED, JOB_SECRET_ROTATED, AGENT_MQTT_REGISTERED, WEBHOOK_SET):
        body.pop("sealed_secret", None)
        if isinstance(body.get("broker"), dict):
            body["broker"].pop("sealed_password", None)
    return body


def snapshot_rows(live_view: LiveView, lists: RowLists, wanted: Wanted) -> dict[str, Any]:
    """Return rows of jobs and sessions that match the filter's kinds and stream, at most 1,000 of each.

    The rows of both have at most 8 MiB together. The result has `rows` and `total`, both by the name of the
    view, such as `registry_jobs`. `total` is the number of all matching rows. Rows of jobs and sessions that
    have not ended come first, then the newest.
    """
    rows: dict[str, list[Any]] = {}
    total: dict[str, int] = {}
    left = SNAPSHOT_BYTES
    kinds: tuple[tuple[str, type[JobRow | SessionRow], OrderedRows[Any], list[str], list[str]], ...] = (
        (JOB, JobRow, lists.jobs, _LIVE_JOBS, list(JOB_TERMINAL)),
        (SESSION, SessionRow, lists.sessions, _LIVE_SESSIONS, [TERMINATED]),
    )
    for kind, row_type, index, live, ended in kinds:
        if wanted.kinds is not None and kind not in wanted.kinds:
            continue
        if wanted.stream is None:
            found = index.newest(live, SNAPSHOT_ROWS)
            found += index.newest(ended, SNAPSHOT_ROWS - len(found))
            total[row_type.VIEW] = index.count([*live, *ended])
        else:
            name = wanted.stream.removeprefix(f"{kind}/")
            row = live_view.get(row_type, name) if wanted.stream == f"{kind}/{name}" else None
            found = [] if row is None else [row]
            total[row_type.VIEW] = len(found)
        shown = rows[row_type.VIEW] = []
        for row in found:
            encoded = orjson.dumps(row_as_json(row))
            left -= len(encoded)
            if left < 0:
                break
            shown.append(orjson.Fragment(encoded))
    return {"rows": rows, "total": total}


def kinds_for(role_sees_all: bool, asked: str | None) -> frozenset[str] | None:
    """Return the kinds of stream whose records a client gets; None means all kinds.

    Args:
        role_sees_all: Whether the client is the operator. Other clients get only records of jobs and sessions.
        asked: The kind that the client asked for; None means each kind that it may see.

    Returns:
        The kinds. The set is empty if the client may not see the kind that it asked for.
    """
    if asked is None:
        return None if role_sees_all else PUBLIC_KINDS
    return frozenset({asked}) if role_sees_all else frozenset({asked}) & PUBLIC_KINDS
