"""The hub's HTTP streams: settled records of all streams or of one job, and verdicts for the bridges.

The bridge of MQTT puts verdicts into receipts (JE-17, LM-05). The verdict on an agent's message is that of its
record in the agent's stream. But the sender wants to know, too, whether the message has come into the mailbox.
If the mailbox may be full, the verdict waits for the record that the reactor appends for the mailbox, and is
the rejection of that record. The verdict on an agent's confirmation is that of the claim, which the reactor
appends for the mailbox, too. The bridge's own time limit bounds the wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import Query, Request, Response
from pydantic import Field

from connectors.hub.engine.operation import owner_by
from connectors.hub.live.settled_feed import FellBehind, SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.services.settled_stream import (
    TICK_S,
    EventWriter,
    Follower,
    Wanted,
    kinds_for,
    server_events,
    snapshot_rows,
)
from connectors.hub.serving.admission import Gate, Routes
from connectors.hub.serving.answers import DOOR, not_found, row_as_json
from connectors.hub.serving.models import ERRORS, QueryFilter
from connectors.hub.serving.policy import Action
from connectors.hub.serving.streaming_answer import EVENT_STREAM, LastEventId, Reserve, StreamingAnswer
from connectors.operations.agents.agent_operations import participant_as_json
from connectors.operations.rules.owners import session_of_job
from connectors.operations.work.job_operations import JOBS, JobPath
from schemas.streams.agents.agent_registry import ParticipantRow
from schemas.streams.agents.mqtt_agents import AGENT_CONFIRMED, AGENT_SAID
from schemas.streams.job.job_registry import JOB_EVENT, JobRow
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_CLAIMED
from schemas.streams.mailboxes.message import DEFAULT_REALM, MESSAGE_POSTED
from schemas.streams.principal.principals import OPERATOR
from schemas.wire.record import Position
from trunkline_agent.wire.ids import JOB, MAILBOX, NAME_LIMIT, stream_key
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.verdicts import ACCEPTED, MAILBOX_FULL, REJECTED

_FILE_DOOR: Final = "file"
_BY_FILES: Final = f"{_FILE_DOOR}/"
_BY_MQTT: Final = "mqtt/"
_MOST: Final = 10_000

Verdict = tuple[int, int, str, str | None]
# The stream and the id of a posting, and the principal that it comes from.
_Posting = tuple[str, str, str]


class ReceiptVerdicts:
    """The verdicts for the receipts of one bridge. Not thread-safe.

    `may_be_full` returns for a recipient and a message id whether the mailbox may refuse the message.
    """

    def __init__(self, may_be_full: Callable[[str, str], bool]) -> None:
        self._may_be_full = may_be_full
        self._waiting: OrderedDict[_Posting, list[tuple[int, int]]] = OrderedDict()
        # Postings that were refused before their messages were seen: partitions are read side by side.
        self._refused_early: OrderedDict[_Posting, None] = OrderedDict()
        # The messages that were refused, by the ids of their records: their senders may repeat them.
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._ids: dict[_Posting, str] = {}
        # By stream and id of the claim: the positions of the confirmations that wait for its verdict, or the
        # verdict if it came first.
        self._claims: OrderedDict[tuple[str, str | None], list[Position] | tuple[str, str | None]] = (
            OrderedDict()
        )

    def of(self, records: Sequence[SettledRecord]) -> list[Verdict]:
        """Return the verdicts that follow from the next settled records: partition, offset, verdict, reason."""
        found: list[Verdict] = []
        for record in records:
            if record.type == JOB_EVENT:
                found.append((*record.position, record.verdict, record.reason))
            elif record.type == AGENT_SAID:
                found += self._said(record)
            elif record.type == AGENT_CONFIRMED:
                found += self._confirmed(record)
            elif record.type == MESSAGE_CLAIMED and (record.principal or "").startswith(_BY_MQTT):
                found += self._claimed(record)
            elif record.type == MESSAGE_POSTED and (record.principal or "").startswith(_BY_MQTT):
                found += self._posted(record)
        return found

    def _said(self, record: SettledRecord) -> list[Verdict]:
        own: Verdict = (*record.position, record.verdict, record.reason)
        if record.verdict == REJECTED:
            return [own]
        if record.verdict != ACCEPTED:
            return [(*record.position, REJECTED, MAILBOX_FULL) if record.ce_id in self._refused else own]
        posting = _posting_of(record)
        if posting is None:
            return [own]
        if self._refused_early.pop(posting, posting) is None:
            self._note_refused(str(record.ce_id))
            return [(*record.position, REJECTED, MAILBOX_FULL)]
        if not self._may_be_full(posting[0].rpartition("/")[2], posting[1]):
            return [own]
        self._waiting.setdefault(posting, []).append((record.position.partition, record.position.offset))
        self._ids[posting] = str(record.ce_id)
        if len(self._waiting) > _MOST:
            oldest, positions = self._waiting.popitem(last=False)
            del self._ids[oldest]
            return [(*position, ACCEPTED, None) for position in positions]
        return []

    def _posted(self, record: SettledRecord) -> list[Verdict]:
        posting: _Posting = (record.stream, str(record.ce_id), str(record.principal))
        is_refused = record.reason == MAILBOX_FULL
        positions = self._waiting.pop(posting, None)
        if positions is None:
            if is_refused:
                self._refused_early[posting] = None
                if len(self._refused_early) > _MOST:
                    self._refused_early.popitem(last=False)
            return []
        said = self._ids.pop(posting)
        if is_refused:
            self._note_refused(said)
            return [(*position, REJECTED, MAILBOX_FULL) for position in positions]
        return [(*position, ACCEPTED, None) for position in positions]

    def _confirmed(self, record: SettledRecord) -> list[Verdict]:
        if record.verdict != ACCEPTED:
            return [(*record.position, record.verdict, record.reason)]
        key = (stream_key(MAILBOX, f"{DEFAULT_REALM}/{record.stream.partition('/')[2]}"), record.ce_id)
        known = self._claims.pop(key, [])
        if isinstance(known, tuple):
            return [(*record.position, *known)]
        self._put_claim(key, [*known, record.position])
        return []

    def _claimed(self, record: SettledRecord) -> list[Verdict]:
        key, verdict = (record.stream, record.ce_id), (record.verdict, record.reason)
        waiting = self._claims.pop(key, None)
        if isinstance(waiting, list):
            return [(*position, *verdict) for position in waiting]
        self._put_claim(key, verdict)
        return []

    def _put_claim(self, key: tuple[str, str | None], value: list[Position] | tuple[str, str | None]) -> None:
        self._claims[key] = value
        if len(self._claims) > _MOST:
            self._claims.popitem(last=False)

    def _note_refused(self, said: str) -> None:
        self._refused[said] = None
        if len(self._refused) > _MOST:
            self._refused.popitem(last=False)


def _file_verdicts(records: Sequence[SettledRecord]) -> list[Verdict]:
    """Return the verdicts on postings of the file queue among settled records (LM-08)."""
    return [
        (*record.position, record.verdict, record.reason)
        for record in records
        if record.type == MESSAGE_POSTED and (record.principal or "").startswith(_BY_FILES)
    ]


async def _verdict_lines(
    follower: Follower, verdicts_of: Callable[[Sequence[SettledRecord]], list[Verdict]]
) -> AsyncIterator[bytes]:
    """Yield lines of JSON with the verdicts on records of a bridge; `{}` at least every second.

    `verdicts_of` chooses the verdicts. It is called with the settled records in their order.

    A line is `{"settled": [...]}`, and a verdict is `[partition, offset, verdict, reason]`. The stream starts
    with the records settled from now on. It ends without an error when `follower.goes_on` returns False, or
    when records that it has not read are no longer in memory.
    """
    cursor = follower.feed.newest
    yield b"{}\n"
    with suppress(FellBehind):
        async for _, records in follower.batches(cursor, TICK_S):
            found = verdicts_of(records)
            yield orjson.dumps({"settled": found}) + b"\n" if found else b"{}\n"


def _posting_of(record: SettledRecord) -> _Posting | None:
    """Return which posting the reactor makes of an agent's message; None if that cannot be read."""
    try:
        said: Any = None if record.value is None else decode(record.value)[0]
    except MalformedJsonError:
        return None
    if not isinstance(said, dict):
        return None
    to, message_id = said.get("to"), said.get("message_id")
    if not isinstance(to, str) or not isinstance(message_id, str):
        return None
    agent = record.stream.partition("/")[2]
    return stream_key(MAILBOX, f"{DEFAULT_REALM}/{to}"), message_id, f"{_BY_MQTT}{agent}"


NDJSON: Final = "application/x-ndjson"
Chunks = Callable[[Follower, Reserve], AsyncIterator[bytes]]
"""Returns the bytes of a stream of settled records."""


class EventFilter(QueryFilter):
    """The settled records to stream: the records that match every filter."""

    stream: (
        Annotated[str, Field(max_length=2 * NAME_LIMIT + 20, pattern=r"^[a-z]+/[A-Za-z0-9._/-]+$")] | None
    ) = None
    """Stream of the records, such as `job/0a1b2c3d`. Without it: any."""
    kind: Annotated[str, Field(pattern=r"^[a-z]+$", max_length=20)] | None = None
    """Kind of the records' streams, such as `job`. Without it: any."""
    type: Annotated[str, Field(pattern=r"^[a-z_.]+(,[a-z_.]+)*$", max_length=200)] | None = None
    """Types of the records, such as `job.registered`, joined by commas. Without it: any."""
    verdict: Literal["accepted", "duplicate", "rejected"] | None = None
    """Verdict on the records. Without it: any."""


class VerdictFilter(QueryFilter):
    """The records whose verdicts to stream."""

    door: Literal["mqtt", "file"] = "mqtt"
    """`mqtt`: events and messages that came over MQTT. `file`: messages of the file queue."""


def _documented(media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}, **ERRORS}


def add_stream_routes(routes: Routes, hub: Hub, gate: Gate) -> None:
    """Add the routes `/api/hub/events`, `/api/hub/jobs/{job_id}/events` and `/api/hub/verdicts`.

    During a stream, `gate` checks whether the client's token is still valid. If not, the stream ends.
    """

    def agent(name: str) -> dict[str, Any] | None:
        row = hub.live_view.get(ParticipantRow, name)
        return None if row is None else participant_as_json(row)

    places, writer = hub.new_stream_places(DOOR), EventWriter(hub.boot_id, agent)

    def answer(request: Request, chunks: Chunks, media_type: str) -> StreamingAnswer:
        follower = Follower(hub.live_view.feed, lambda: not hub.stopping.is_set() and gate.still_holds(request))
        return places.answer(request.state.caller, partial(chunks, follower), media_type)

    def events(rows: Callable[[], Any], wanted: Wanted, last_id: str | None) -> Chunks:
        return lambda follower, reserve: server_events(writer, follower, wanted, last_id, rows, reserve)

    @routes.get(
        "/api/hub/events", Action.EVENTS_READ, response_class=Response, responses=_documented(EVENT_STREAM)
    )
    async def follow_all(
        request: Request, asked: Annotated[EventFilter, Query()], last_event_id: LastEventId = None
    ) -> Response:
        """Stream settled records as server-sent events: first `snapshot`, then `settled`.

        The event `gap` reports that events were missed. A record that changes the registry of agents has an
        additional event before its `settled`: `agent:created`, `agent:updated` or `agent:removed`, with the
        present state of the agent. Only the operator sees other streams than those of jobs and sessions.
        """
        kinds = kinds_for(request.state.caller.role == OPERATOR, asked.kind)
        types = None if asked.type is None else frozenset(asked.type.split(","))
        wanted = Wanted(kinds, asked.stream, types, asked.verdict)

        def rows() -> Any:
            return snapshot_rows(hub.live_view, hub.lists, wanted)

        return answer(request, events(rows, wanted, last_event_id), EVENT_STREAM)

    @routes.get(
        f"{JOBS.path}/{{job_id}}/events",
        Action.JOB_READ,
        owner_of=owner_by(hub, partial(session_of_job, hub)),
        response_class=Response,
        responses=_documented(EVENT_STREAM),
    )
    async def follow_job(request: Request, job_id: JobPath, last_event_id: LastEventId = None) -> Response:
        """Stream the settled records of one job: first `snapshot` with its row, then `settled`.

        The answer is 404 for an unknown job. The event `gap` reports that events were missed.
        """
        if hub.live_view.get(JobRow, job_id) is None:
            raise not_found("no job with this id")
        wanted = Wanted(stream=stream_key(JOB, job_id))

        def row() -> Any:
            found = hub.live_view.get(JobRow, job_id)
            return {"row": None if found is None else row_as_json(found)}

        return answer(request, events(row, wanted, last_event_id), EVENT_STREAM)

    @routes.get(
        "/api/hub/verdicts", Action.VERDICTS_READ, response_class=Response, responses=_documented(NDJSON)
    )
    async def follow_verdicts(request: Request, asked: Annotated[VerdictFilter, Query()]) -> Response:
        """Stream the verdicts on records of a bridge, as lines of JSON; `{}` at least every second."""
        verdicts_of = _file_verdicts if asked.door == _FILE_DOOR else ReceiptVerdicts(hub.limits.may_refuse).of
        return answer(request, lambda follower, _: _verdict_lines(follower, verdicts_of), NDJSON)
