"""The fold of `session/<name>` (JE-14): the sessions that agents live in, and the jobs they host.

One entry, `session`. A terminated session keeps it as its tombstone: its name is not used again.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold import life_cycles as states
from schemas.fold.entries import Entries
from schemas.fold.request_memory import RequestMemory
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import REGISTRY_SESSIONS, SessionRow
from schemas.streams.session.session_registry import HARD, SOFT, STOP
from schemas.wire.record import (
    SESSION_CREATED,
    SESSION_JOB_ASSIGNED,
    SESSION_JOB_ENDED,
    SESSION_RESUMED,
    SESSION_STOPPED,
    Envelope,
    Record,
)
from schemas.wire.verdicts import AFTER_TERMINAL, ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
_SESSION: Final = "session"
_STATE_BY_MODE: Final = {STOP: states.STOPPED, HARD: states.TERMINATED, SOFT: states.ARCHIVED}


class SessionEntry(msgspec.Struct, array_like=True, gc=False):
    """All that is known of a session; the fields of its row, and the requests that were settled."""

    version: int
    status: str
    created_by: str
    created_at: int
    requests: RequestMemory
    description: str = ""
    host: str | None = None
    handle: str | None = None
    for_job: str | None = None
    job_id: str | None = None
    jobs_ended: int = 0
    stopped_at: int | None = None
    reason: str | None = None
    capture_id: str | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(SessionEntry).decode


def settle_session(
    record: Record, envelope: Envelope, name: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    """Settle one record of the session's stream whose body passed the checks of its wire model."""
    raw = entries.get(_SESSION)
    if raw is None:
        # A job may be picked by a session that nobody created here: then that is how we learn of it.
        if envelope.type not in (SESSION_CREATED, SESSION_JOB_ASSIGNED):
            return rejected(UNKNOWN_STREAM, "no session with this name")
        session = _created(record, envelope, body)
    else:
        session = _decode(raw)
        seen = session.requests.seen(envelope.ce_id, body)
        if seen == "same":
            return duplicate(session.status)
        if seen == "other":
            return rejected(SEQ_CONFLICT, "this request id was used with other content", session.status)
        if envelope.type == SESSION_CREATED:
            return rejected(SEQ_CONFLICT, "a session with this name exists already", session.status)
    refusal = _apply(record, envelope.type, body, session)
    if refusal is not None:
        return refusal
    session.requests.add(envelope.ce_id, body)
    entries.put(_SESSION, _encode(session))
    return accepted(session.status, (_change(name, session),))


def _created(record: Record, envelope: Envelope, body: dict[str, Any]) -> SessionEntry:
    return SessionEntry(
        version=ENTRY_VERSION,
        status=states.RUNNING,
        created_by=f"{envelope.door}/{envelope.principal}",
        created_at=record.logged_at_us,
        requests=RequestMemory(),
        description=body.get("description", ""),
        host=body.get("host"),
        handle=body.get("handle"),
        for_job=body.get("for_job"),
    )


def _apply(record: Record, kind: str, body: dict[str, Any], session: SessionEntry) -> Outcome | None:
    """Change `session`, or say why not."""
    status = session.status
    if kind == SESSION_JOB_ENDED:
        session.jobs_ended += 1
        if session.job_id == body["job_id"]:
            session.job_id = None
        # An archived session was released: it is left alive, whatever it was made for.
        if session.for_job == body["job_id"] and status in (states.RUNNING, states.STOPPED):
            _end(record, session, states.TERMINATED, f"job {body['outcome']}")
        return None
    if kind == SESSION_CREATED:
        return None
    if status == states.TERMINATED:
        return rejected(AFTER_TERMINAL, "the session is terminated", status)
    if kind == SESSION_JOB_ASSIGNED:
        if status != states.RUNNING:
            return rejected(ILLEGAL_TRANSITION, f"the session is {status}", status)
        session.job_id = body["job_id"]
        return None
    wanted = _STATE_BY_MODE[body.get("mode", STOP)] if kind == SESSION_STOPPED else states.RUNNING
    if wanted not in states.SESSION_TRANSITIONS[status]:
        return rejected(ILLEGAL_TRANSITION, f"the session is {status}", status)
    if kind == SESSION_RESUMED:
        session.status, session.stopped_at, session.reason = wanted, None, None
        session.host, session.handle = body.get("host") or session.host, body.get("handle") or session.handle
        return None
    _end(record, session, wanted, body.get("reason") or None)
    session.capture_id = body.get("capture_id")
    return None


def _end(record: Record, session: SessionEntry, status: str, reason: str | None) -> None:
    session.status = status
    session.stopped_at = record.logged_at_us
    session.reason = reason


def _change(name: str, session: SessionEntry) -> Change:
    row = SessionRow(
        session=name,
        status=session.status,
        description=session.description,
        host=session.host,
        handle=session.handle,
        for_job=session.for_job,
        job_id=session.job_id,
        jobs_ended=session.jobs_ended,
        created_by=session.created_by,
        created_at=session.created_at,
        stopped_at=session.stopped_at,
        reason=session.reason,
        capture_id=session.capture_id,
    )
    return Change(REGISTRY_SESSIONS, name, row)
