"""The live events of the dashboard: frames that are written once and sent to all readers.

**Delivers** each frame to each reader, in order. The only state of a reader is its number in the ring of
frames. **Loses when** a reader does not read: its connection is cut, and nothing is kept for it. It reconnects
with the log position that it has reached, and gets the records since then from memory or the ledger. Where
these are too many or too old, an event `reset` tells it to load a new snapshot.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from connectors.doors.dashboard.boards import AgentBoard, MailboxBoard
from connectors.doors.dashboard.event_frames import PULSE_S, Frame, FrameWriter, Pulse, events_text
from connectors.doors.dashboard.past_records import Rejections, records_between, records_in_memory
from connectors.hub.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.streaming_answer import Reserve
from schemas.streams.principal.principals import VIEWER
from trunkline_agent.errors import TrunklineError

LENGTH_LIMIT: Final = 16 * 1024
_FORM: Final = re.compile(r"e(\d{1,9}):((?:\d{1,15}\.)*\d{1,15})").fullmatch


@dataclass
class LogPosition:
    """A position in the log: the next offset of each partition, in one epoch of the log.

    As text (`e1:17.4.9`) it is the id of an event, and is valid at every gateway.
    """

    epoch: int
    offsets: dict[int, int]

    def __str__(self) -> str:
        return f"e{self.epoch}:" + ".".join(str(self.offsets[number]) for number in sorted(self.offsets))

    def advance(self, records: Iterable[SettledRecord]) -> None:
        """Change this position so that it is behind all of these records. No partition's offset is reduced."""
        for record in records:
            partition, offset = record.position
            self.offsets[partition] = max(self.offsets.get(partition, 0), offset + 1)

    def is_ahead_of(self, other: LogPosition) -> bool:
        """Return whether this position has a higher offset than the other one in at least one partition.

        Both are of the same epoch. A partition that a position does not name is at offset 0 there.
        """
        return any(offset > other.offsets.get(number, 0) for number, offset in self.offsets.items())

    def up_to(self, other: LogPosition) -> dict[int, tuple[int, int]]:
        """Return the offsets from this position to a later one, as `(first, end)` for each partition.

        `end` is exclusive. Partitions in which `other` is not later are left out. `other` must have all
        partitions of this position.
        """
        return {
            number: (offset, other.offsets[number])
            for number, offset in self.offsets.items()
            if offset < other.offsets[number]
        }


def parsed_position(text: str, epoch: int, partitions: int) -> LogPosition | None:
    """Parse the event id that a reader has sent back, such as `e1:17.4.9`.

    `epoch` and `partitions` are those of the present log. Returns None for a text of another form, another
    epoch, or another number of partitions.
    """
    found = _FORM(text) if len(text) <= LENGTH_LIMIT else None
    if found is None or int(found[1]) != epoch:
        return None
    offsets = [int(number) for number in found[2].split(".")]
    return LogPosition(epoch, dict(enumerate(offsets))) if len(offsets) == partitions else None


log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "dashboard"
# The time between two frames, so that 500 records a second make a dozen events a second for a page. And the
# time that the first record after a silence waits for others.
FRAME_S: Final = 0.08
_GATHER_S: Final = 0.01
_FRAME_RECORDS: Final = 2000
# The number of frames that a reader may be behind: ten seconds at full speed.
RING_FRAMES: Final = 120
_RING_BYTES: Final = 16 * 1024 * 1024
# The most records that are looked up for a reader that reconnects. A snapshot is cheaper than more.
RESUME_RECORDS: Final = 5000
_RESUME_FRAME: Final = 250
_OTHER_GATEWAY_S: Final = 2.0
_TICK_S: Final = 1.0


class EventBroadcast:
    """A ring of the newest frames (bytes of server-sent events), from which all readers are served.

    Call `start_here` once. Run the coroutine `run` and all `follow` generators in the same event loop.
    `readers` is the number of connected readers. `agents`, `mailboxes` and `pulse` are the sources of the rows
    and figures in the frames.
    """

    def __init__(self, hub: Hub, rejections: Rejections) -> None:
        self._hub = hub
        self._feed: SettledFeed = hub.live_view.feed
        self.mailboxes = MailboxBoard(hub)
        self.agents = AgentBoard(hub, self.mailboxes)
        self.pulse = Pulse(hub, self.mailboxes)
        self._writer = FrameWriter(hub, self.agents)
        self._rejections = rejections
        self._ring: deque[tuple[str, Frame]] = deque()
        self._bytes = 0
        self._newest = 0  # the number of the ring's last frame, counted from 1
        self._fresh = asyncio.Event()
        self._cursor = 0
        self._at = LogPosition(hub.settings.kafka.epoch, {})
        self.readers = 0

    def start_here(self) -> None:
        """Set the position to the present end of the live view. Frames then contain only later records.

        Call it when the live view is open, before `run`.
        """
        # The feed has records a moment before the offsets include them. Without `advance` some would never be
        # sent.
        # Records that arrive meanwhile are sent twice.
        self._cursor = self._feed.newest
        self._at = LogPosition(self._at.epoch, self._hub.live_view.next_offsets())
        self._at.advance(records_in_memory(self._feed))

    @property
    def position(self) -> str:
        """The log position after the newest frame, as text: the id of that frame's last event."""
        return str(self._at)

    async def run(self) -> None:
        """Append frames of settled records, and the figures of each second, to the ring until cancelled.

        A frame is the bytes of server-sent events. While there are no readers, no frames are written. An
        unexpected error ends the coroutine and is raised in an ExceptionGroup. The caller may then call `run`
        again.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_feed())
            tasks.create_task(self._beat())

    async def _follow_feed(self) -> None:
        while True:
            await self._feed.wait_beyond(self._cursor)
            await asyncio.sleep(_GATHER_S)
            began = time.monotonic()
            try:
                records, self._cursor = self._feed.since(self._cursor, _FRAME_RECORDS)
            except FellBehind:
                # The feed dropped records before they were read: start again at the end.
                self.start_here()
                self._add(self._reset("too much was settled at once"))
                continue
            self._at.advance(records)
            if self.readers:
                self._add(*self._writer.frame(records, self.position))
            else:
                # There are no readers. One that reconnects gets the records themselves from memory.
                self._ring.clear()
                self._bytes = 0
            spent = time.monotonic() - began
            await asyncio.sleep(max(0.0, FRAME_S - _GATHER_S - spent))

    async def _beat(self) -> None:
        while True:
            figures = await asyncio.to_thread(self.pulse.beat)
            if self.readers:
                reasons = self._rejections.by_reason(VIEWER)
                told = {**figures, **self.pulse.mailboxes, "reasons": reasons, "readers": self.readers}
                self._add(events_text({"pulse": told}, self.position))
            await asyncio.sleep(PULSE_S)

    def _add(self, full: bytes, public: bytes | None = None) -> None:
        """Append a frame to the ring. Without `public` it is the same for all readers."""
        self._ring.append((self.position, Frame(full, public or full)))
        self._newest += 1
        self._bytes += len(full)
        while len(self._ring) > 1 and (len(self._ring) > RING_FRAMES or self._bytes > _RING_BYTES):
            self._bytes -= len(self._ring.popleft()[1].full)
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    async def follow(
        self, role: str, last_event_id: str | None, goes_on: Callable[[], bool], reserve: Reserve
    ) -> AsyncIterator[bytes]:
        """Yield the server-sent events for one reader as bytes, until it disconnects or the gateway stops.

        A new reader first gets the event `hello` with the present position. A reader that reconnects first gets
        the events that it missed. If these are no longer available, it gets `reset` and must load a new
        snapshot. The stream also ends, without an event, when the reader is behind all frames in memory.

        Args:
            role: The reader's role. Only the operator gets the verdicts of principals' and control records.
            last_event_id: The id of the last event that the reader received before. None for a new reader.
            goes_on: Called at least once a second. The stream ends when it returns False.
            reserve: Waits for the memory of a frame.
        """
        self.readers += 1
        self._hub.metrics.readers(DOOR, 1)
        try:
            number = self._newest
            yield b"retry: 1000\n\n"
            if last_event_id is None:
                yield events_text({"hello": {"position": self.position}}, self.position)
            else:
                missed, number = await self._missed(role, last_event_id)
                for text in missed:
                    await reserve(len(text))
                    yield text
            while goes_on():
                oldest = self._newest - len(self._ring)
                if number < oldest:
                    log.info("slow_reader_dropped", behind=self._newest - number)
                    self._hub.metrics.dropped(DOOR)
                    return
                if number < self._newest:
                    # One at a time: all readers share the bytes of a frame.
                    frame = self._ring[number - oldest][1].of(role)
                    number += 1
                    await reserve(len(frame))
                    yield frame
                    continue
                fresh = self._fresh
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await fresh.wait()
        finally:
            self.readers -= 1
            self._hub.metrics.readers(DOOR, -1)

    async def _missed(self, role: str, last_event_id: str) -> tuple[list[bytes], int]:
        """Return the events between a reader's position and a frame of the ring, and that frame's number."""
        for behind, (position, _) in enumerate(reversed(self._ring)):
            if position == last_event_id:
                return [], self._newest - behind
        kafka = self._hub.settings.kafka
        since = parsed_position(last_event_id, kafka.epoch, kafka.partitions)
        deadline = time.monotonic() + _OTHER_GATEWAY_S
        while since is not None and since.is_ahead_of(self._at) and time.monotonic() < deadline:
            # The reader was at another gateway that is further ahead.
            await asyncio.sleep(FRAME_S)
        number, now = self._newest, LogPosition(self._at.epoch, dict(self._at.offsets))
        if since is None or since.is_ahead_of(now):
            return [self._reset("this is not a position of this log")], number
        records = await asyncio.to_thread(self._records, since, now)
        if records is None:
            return [self._reset("the missed records are too many or no longer available")], number
        texts = []
        for place in range(0, len(records), _RESUME_FRAME):
            part = records[place : place + _RESUME_FRAME]
            since.advance(part)
            texts.append(self._writer.frame(part, str(since)).of(role))
        return texts, number

    def _records(self, since: LogPosition, now: LogPosition) -> Sequence[SettledRecord] | None:
        """Return all records between two positions, oldest first; None if too many or not all available."""
        wanted = since.up_to(now)
        count = sum(end - first for first, end in wanted.values())
        if count > RESUME_RECORDS:
            return None
        found = {record.position: record for record in records_in_memory(self._feed) if _is_in(record, wanted)}
        if len(found) < count:
            missing = {}
            for partition, (first, end) in wanted.items():
                held = [position.offset for position in found if position.partition == partition]
                missing[partition] = (first, min(held, default=end))
            with suppress(TrunklineError):
                for record in records_between(self._hub.settings, missing):
                    found.setdefault(record.position, record)
        if len(found) < count:
            return None
        return sorted(found.values(), key=lambda record: (record.logged_at_us, record.position))

    def _reset(self, why: str) -> bytes:
        return events_text({"reset": {"why": why, "position": self.position}}, self.position)


def _is_in(record: SettledRecord, wanted: dict[int, tuple[int, int]]) -> bool:
    first, end = wanted.get(record.position.partition, (0, 0))
    return first <= record.position.offset < end
