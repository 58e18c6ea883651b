"""The operations of jobs (JE-10 to JE-12): register, pick, assign, cancel, rotate the secret, show, list.

The route that reports an event takes the signed bytes, so it is no operation.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from functools import partial
from typing import Annotated, Any, Final

import orjson
from fastapi import Path, Request, Response

from connectors.hub.engine.family import Family, LongAnswer, Steps, page_by_age, page_by_name
from connectors.hub.engine.operation import Answer, Asked, owner_by
from connectors.hub.live.row_lists import job_lists
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import Routes
from connectors.hub.serving.answers import (
    DOOR,
    ApiError,
    existing,
    json_answer,
    rejection_response,
    row_as_json,
)
from connectors.hub.serving.identities import caller_of, url_safe
from connectors.hub.serving.models import JOB_ID_PATTERN
from connectors.hub.serving.policy import Action, Caller, decide
from connectors.hub.serving.strict_request import UNSUPPORTED
from connectors.operations.rules.owners import owner_in, reporter_of_job, session_of_job
from connectors.operations.work.registration import (
    BrokersAnswer,
    BrokersFilter,
    CancelRequest,
    EventAnswer,
    GrantAnswer,
    JobChangedAnswer,
    JobFilter,
    JobRequest,
    JobsAnswer,
    JobShownAnswer,
    PickRequest,
    RegisteredAnswer,
    RotatedAnswer,
    RotationRequest,
    grant_of,
    opened_overlay,
    register,
)
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.job.job_fold import JobGrant
from schemas.streams.job.job_registry import (
    DESCRIPTION_LIMIT,
    JOB_EVENT,
    JobCancellation,
    JobEvent,
    JobRow,
    JobSecretRotation,
    broker_digest,
)
from schemas.wire.record import JSON_CONTENT, OutgoingRecord
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import JOB, content_id, stream_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.mqtt_password import job_user
from trunkline_agent.wire.verdicts import DUPLICATE, REJECTED, SEQ_CONFLICT


async def _rotate_secret(
    hub: Hub, asked: Asked, job_id: str, overlap_s: int
) -> tuple[dict[str, Any], SettledRecord]:
    """Append a new secret for a job, wait until it is settled, and wait until the job's new MQTT login works.

    Args:
        hub: the hub, with the live view, the keyring and the appender.
        asked: the request. A repeated one, by its idempotency key, gets the same secret.
        job_id: the job.
        overlap_s: for how many seconds the previous secret stays valid.

    Returns:
        The fields of the HTTP answer, with the new secret in clear text, and the settled record.

    Raises:
        ApiError: 404 for an unknown job; 409 for one that has ended, and for a repeated request whose secret a
            later request has replaced.
    """
    known = None if hub.live_view.get(JobRow, job_id) is None else grant_of(hub, job_id)
    secret, keyring = _secret_of(hub.keyring, asked.made, job_id, known)
    record = JobSecretRotation(
        sealed_secret=keyring.seal(secret.encode(), job_secret_purpose(job_id)),
        job_id=job_id,
        overlap_ms=overlap_s * 1000,
        request_id=asked.request_id,
    ).record(**asked.origin)
    settled = await hub.appender.settle_accepted(record)
    grant = grant_of(hub, job_id)
    if secret != grant.secret or grant.old_until is None:
        raise ApiError(409, SEQ_CONFLICT, "a later request has replaced the secret of this request")
    user = job_user(job_id, secret)
    await hub.tell_registered(user)
    answer = {
        "job_id": job_id,
        "secret": secret,
        "position": list(settled.position),
        "mqtt_user": user,
        "old_secret_ends_at": iso_moment(grant.old_until),
    }
    return answer, settled


def _secret_of(keyring: Keyring, made: uuid.UUID, job_id: str, known: JobGrant | None) -> tuple[str, Keyring]:
    """Return the secret that follows from a request, and the keyring that seals it.

    A repeated request gets the same secret, so it need not be stored. Its keyring is that of the first request,
    because the master key may have been rotated since.
    """
    for one in keyring.each():
        secret = _derived(one, made, job_id)
        if known is not None and known.secret == secret:
            return secret, one
    return _derived(keyring, made, job_id), keyring


def _derived(keyring: Keyring, made: uuid.UUID, job_id: str) -> str:
    # The part before the point is not secret: it is in a user name (trunkline_agent.wire.mqtt_password).
    return f"{made.hex[:8]}.{url_safe(keyring.derive(f'rotated-job-secret/{job_id}/{made}'))}"


BROKERS: Final = Family("/api/hub/brokers")
# The text of a job, in UTF-8.
_JOB_BYTES: Final = 4 * DESCRIPTION_LIMIT
JobPath = Annotated[str, Path(pattern=JOB_ID_PATTERN, description="Id of the job, 8 hex digits.")]
_EVENT_EXAMPLE: Final = {
    "schema_version": 1,
    "seq": 1,
    "job_id": "0a1b2c3d",
    "event": "started",
    "timestamp": "2026-01-31T12:00:00Z",
    "detail": "build begins",
    "data": {"hmac_sig": "0" * 64},
}
_EVENT_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {JSON_CONTENT: {"schema": JobEvent.model_json_schema(), "example": _EVENT_EXAMPLE}},
    }
}


_registrar: Final = owner_in(JobRow, "job_id", lambda row: row.registered_by)
JOBS: Final = Family("/api/hub/jobs", owner=_registrar)


async def _session_of_body(request: Request) -> str | None:
    body = await request.json()
    session = body.get("session") if isinstance(body, dict) else None
    return session if isinstance(session, str) else None


def _changed(job_id: str, settled: SettledRecord) -> Answer:
    answer = {"job_id": job_id, "status": settled.status_after, "verdict": settled.verdict}
    return Answer(answer, settled.verdict)


@JOBS.post("", Action.JOB_REGISTER, RegisteredAnswer, STATUS=201)
async def register_job(hub: Hub, asked: Asked, body: JobRequest) -> Answer:
    """Register a job. The answer contains its id and the secret with which its events are signed.

    The answer comes when the job is stored, after at most another second for the job's MQTT account. It is
    409 when the idempotency key was used for another job, and 429 when the caller has too many live jobs.
    """
    job_id, secret, settled = await register(hub, asked, body)
    await hub.tell_registered(job_id)
    answer = {"job_id": job_id, "secret": secret, "position": list(settled.position)}
    return Answer(answer, settled.verdict)


@JOBS.post("/pick", Action.JOB_PICK, GrantAnswer, owner_of=staticmethod(_session_of_body))
async def pick_job(hub: Hub, asked: Asked, body: PickRequest) -> Answer:
    """Give a session the job that it has already, else the oldest pending job that fits it.

    The answer contains the job's secret, description and broker. It is 404 when no job fits, and 409 when
    the session does not run. A pick needs no idempotency key: until the job has ended, the session gets the
    same answer again.
    """
    job_id, settled = await hub.picker.pick(body.session, asked.principal)
    grant = grant_of(hub, job_id)
    row = hub.live_view.get(JobRow, job_id)
    answer = {
        "job_id": job_id,
        "description": grant.description if row is None else row.description,
        "broker": opened_overlay(grant.broker, hub.keyring),
        "secret": grant.secret,
    }
    return Answer(answer, DUPLICATE if settled is None else settled.verdict)


@JOBS.post("/{job_id}/cancel", Action.JOB_CANCEL, JobChangedAnswer, COMMAND="jobs cancel")
def cancel_job(hub: Hub, asked: Asked, job_id: JobPath, body: CancelRequest | None = None) -> Steps:
    """Cancel a job that has not ended, so that its further events are rejected.

    The answer is 404 for an unknown job, and 409 for one that has ended.
    """
    reason = "" if body is None else body.reason
    settled = yield JobCancellation(job_id=job_id, reason=reason, request_id=asked.request_id).record(
        **asked.origin
    )
    return _changed(job_id, settled)


@JOBS.post("/{job_id}/assign", Action.JOB_ASSIGN, JobChangedAnswer)
async def assign_job(hub: Hub, asked: Asked, job_id: JobPath, body: PickRequest) -> Answer:
    """Give this job to a session. The answer does not contain its secret, which the session gets by a pick.

    The answer is 404 for an unknown job. It is 409 when the job is not pending or waits for another
    session, and when the session does not run or has another job. Repeating an assignment changes nothing,
    even without an idempotency key.
    """
    return _changed(job_id, await hub.picker.assign(job_id, body.session, asked.principal))


@JOBS.post("/{job_id}/secret", Action.JOB_ROTATE, RotatedAnswer, STATUS=201)
async def rotate_job_secret(
    hub: Hub, asked: Asked, job_id: JobPath, body: RotationRequest | None = None
) -> Answer:
    """Give a job that has not ended a new secret, which the answer contains.

    The previous secret stays valid for `overlap_s` seconds. Older secrets become invalid. The answer is 404
    for an unknown job, and 409 for one that has ended.
    """
    answer, settled = await _rotate_secret(hub, asked, job_id, (body or RotationRequest()).overlap_s)
    return Answer(answer, settled.verdict)


@JOBS.get("", Action.JOB_LIST, JobsAnswer, COMMAND="jobs list")
def list_jobs(hub: Hub, asked: Asked, wanted: JobFilter) -> LongAnswer:
    """List the jobs that match every given filter (state, session, age in seconds), newest first.

    An answer has `limits.answer_bytes` at most; `left` is the number of older jobs beyond that.
    """
    lists, since, before = job_lists(wanted.state, wanted.session), 0, None
    now_s = hub.log_clock.now_s()
    if wanted.newer_than_s is not None:
        since = math.floor((now_s - wanted.newer_than_s) * 1e6) + 1
    if wanted.older_than_s is not None:
        before = (math.ceil((now_s - wanted.older_than_s) * 1e6), "")
    index, limit = hub.lists.jobs, wanted.limit
    return page_by_age(hub, "jobs", index, lists, limit, row_bytes=_JOB_BYTES, since=since, before=before)


@JOBS.get("/{job_id}", Action.JOB_READ, JobShownAnswer, owner=session_of_job, COMMAND="jobs show")
def show_job(hub: Hub, asked: Asked, job_id: JobPath) -> dict[str, Any]:
    """Show one job with the settings of its own broker, if it has one, or answer 404.

    Only the operator sees that broker's password, in sealed form.
    """
    row = existing(hub.live_view.get(JobRow, job_id), "no job with this id")
    return {**row_as_json(row), "broker": _overlay_for(asked.caller, hub, job_id)}


@BROKERS.get("", Action.BROKERS_READ, BrokersAnswer)
async def list_brokers(hub: Hub, asked: Asked, wanted: BrokersFilter) -> LongAnswer:
    """List each broker that a live job names, once, with its password sealed.

    They are sorted by the SHA-256 of their settings. An answer has `limits.answer_bytes` at most. The MQTT
    bridge connects to these brokers.
    """
    brokers = await asyncio.to_thread(hub.overlays.distinct)
    return page_by_name(hub, "brokers", brokers, broker_digest, wanted, str)


def _overlay_for(caller: Caller, hub: Hub, job_id: str) -> dict[str, Any] | None:
    try:
        overlay = grant_of(hub, job_id).broker
    except TrunklineError:  # its secret needs another master key, and its row can still be shown
        return None
    if overlay is None:
        return None
    fields: dict[str, Any] = orjson.loads(overlay)
    if not decide(caller, Action.BROKERS_READ).allowed:
        fields["sealed_password"] = None
    return fields


def add_event_route(routes: Routes, hub: Hub) -> None:
    """Add the route that reports an event of a job. Called once, when the gateway starts."""

    @routes.post(
        f"{JOBS.path}/{{job_id}}/events",
        Action.JOB_REPORT,
        EventAnswer,
        owner_by(hub, partial(reporter_of_job, hub)),
        openapi_extra=_EVENT_BODY,
    )
    async def report_event(request: Request, job_id: JobPath) -> Response:
        """Report an event of a job. The body is the signed event, byte for byte as over MQTT.

        A worker reports the events of the job that its session has, a delegator those of the jobs that it
        registered. The answer comes when the event is settled. A repeated event is a duplicate and changes
        nothing. The answer is 403 for a wrong signature (`bad_signature`), 400 for an invalid event, and 409
        for an event that does not fit the state of the job or its other events. The ledger has each of them.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_CONTENT:
            raise ApiError(415, UNSUPPORTED, f"the body must be {JSON_CONTENT}")
        stream, payload = stream_key(JOB, job_id), await request.body()
        record = OutgoingRecord(
            stream=stream,
            ce_id=content_id(stream.encode("ascii"), payload),
            door=DOOR,
            principal=caller_of(request).principal,
            type=JOB_EVENT,
            value=payload,
        )
        settled = await hub.appender.settle(record)
        if settled.verdict == REJECTED:
            return rejection_response(settled)
        answer = {
            "ce_id": record.ce_id,
            "seq": settled.seq,
            "verdict": settled.verdict,
            "reason": None,
            "position": list(settled.position),
            "status": settled.status_after,
        }
        return json_answer(answer, verdict=settled.verdict)
