"""A backbone with something to see: jobs in every state, agents, mailboxes, and what was rejected."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import rsa

from connectors.log.publisher import Publisher
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.agents.agent_registry import AgentJoined, AgentStopped, AgentUpdated
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.streams.mailboxes.mailbox_bodies import MailboxLease, MessageNack
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import OutgoingRecord
from tests.connectors.doors.http_api.hub_access import JOBS, register
from tests.connectors.folded_log import FoldedLog
from tests.schemas.job_records import signed
from trunkline_agent.mcp.signing import public_pem
from trunkline_agent.wire.ids import content_id

# Any key will do: nothing is signed here, and the fold looks at the form alone.
_PUBLIC_KEY = public_pem(rsa.generate_private_key(public_exponent=65537, key_size=2048))

WORK = (
    ("Rebuild the search index after the schema change", "indexer"),
    ("Summarise the incident reports of last week", "writer"),
    ("Translate the handbook into French", "writer"),
    ("Check all links of the documentation", "crawler"),
    ("Find the query that makes the nightly import slow", "analyst"),
    ("Write tests for the invoice parser", "builder"),
    ("Compare the two candidate layouts for the start page", "designer"),
    ("Move the archive to the new bucket", "porter"),
)
STEPS = (
    "reading the repository",
    "plan made, four steps",
    "first draft is there",
    "tests are green",
    "waiting for a review of the draft",
)
_AGENTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("indexer", "keeps the search index", "working", ("search", "index")),
    ("writer", "writes and translates", "working", ("write", "translate")),
    ("analyst", "looks into slow queries", "blocked", ("sql",)),
    ("builder", "writes programs and tests", "idle", ("python", "tests")),
    ("crawler", "checks links", "idle", ("http",)),
)


def event(job: dict[str, Any], seq: int, name: str, detail: str, **changes: Any) -> OutgoingRecord:
    """A signed event of a job."""
    fields = {"job_id": job["job_id"], "timestamp": "2026-01-01T00:00:00Z", "detail": detail, **changes}
    return raw_event(job["job_id"], json.dumps(signed(seq, name, job["secret"], **fields)).encode())


def raw_event(job_id: str, value: bytes) -> OutgoingRecord:
    """These bytes as an event of a job."""
    return OutgoingRecord(f"job/{job_id}", content_id(value), "mqtt", "unverified", JOB_EVENT, value)


def joined(name: str, task: str = "", capabilities: Iterable[str] = ()) -> OutgoingRecord:
    """An agent takes part."""
    body = AgentJoined(
        agent_name=name,
        request_id=uuid.uuid4().hex,
        task=task,
        capabilities=list(capabilities),
        public_key=_PUBLIC_KEY,
    )
    return body.record(door="mcp", principal=name)


def updated(name: str, status: str) -> OutgoingRecord:
    """An agent says how it is."""
    body = AgentUpdated.model_validate({"agent_name": name, "request_id": uuid.uuid4().hex, "status": status})
    return body.record(door="mcp", principal=name)


def stopped(name: str, reason: str) -> OutgoingRecord:
    """An agent takes part no more."""
    body = AgentStopped(agent_name=name, request_id=uuid.uuid4().hex, reason=reason)
    return body.record(door="mcp", principal=name)


def message(sender: str, recipient: str, text: str, priority: str = "normal") -> OutgoingRecord:
    """A message from one agent to another."""
    body = Message.model_validate(
        {
            "message_id": uuid.uuid4().hex,
            "from": sender,
            "to": recipient,
            "kind": "message",
            "priority": priority,
            "body": json.dumps({"text": text}),
        }
    )
    return body.record(door="mcp", principal=sender)


def mailbox_at_work(publisher: Publisher, recipient: str) -> None:
    """Of the messages that wait for a recipient, one dies, and two are leased for five minutes."""
    by: Any = {"door": "http", "principal": recipient}
    mailbox = ("default", recipient)
    dead = message("writer", recipient, "a draft that nobody can read")
    append(publisher, [dead])
    lease = MailboxLease(
        realm=mailbox[0], to=mailbox[1], request_id="lease-1", message_ids=[dead.ce_id], attempts_most=1
    ).record(**by)
    append(
        publisher,
        [
            lease,
            MessageNack(
                realm=mailbox[0],
                to=mailbox[1],
                message_id=dead.ce_id,
                request_id="lease-1",
                reason="the draft is not valid JSON",
            ).record(**by),
        ],
    )
    append(
        publisher,
        [
            MailboxLease(
                realm=mailbox[0], to=mailbox[1], request_id="lease-2", limit=2, lease_ms=300_000
            ).record(**by)
        ],
    )


def append(publisher: Publisher, records: Iterable[OutgoingRecord]) -> None:
    """Append records and wait until Kafka has them."""
    for waited in [publisher.append(record) for record in records]:
        waited.result(10)


def picked(operator: httpx.Client, description: str, session: str, **fields: Any) -> dict[str, Any]:
    """A job that a session has picked."""
    job = register(operator, description=description, session=session, **fields)
    answer = operator.post(f"{JOBS}/pick", json={"session": session})
    assert answer.status_code == 200, answer.text
    return job


def full_life(publisher: Publisher, job: dict[str, Any], end: str = "completed") -> None:
    """A job from its start to its end, with a question, an event that was sent again, and a forged one."""
    forged = {**job, "secret": "not the secret of this job"}
    second = event(job, 2, "progress", STEPS[0])
    append(
        publisher,
        [
            event(job, 1, "started", "session is up"),
            second,
            second,
            event(forged, 3, "progress", "this one is forged"),
            event(job, 3, "permission_required", "may I write to the index?"),
            event(job, 4, "progress", STEPS[3]),
            event(job, 5, end, "all pages are indexed" if end == "completed" else "the index is locked"),
        ],
    )


def play(operator: httpx.Client, publisher: Publisher, jobs: int = 40) -> list[dict[str, Any]]:
    """The whole scene; returns the jobs, the one with the full life first."""
    for name, task, status, capabilities in _AGENTS:
        append(publisher, [joined(name, task, capabilities), updated(name, status)])
    append(publisher, [joined("porter", "moves archives"), stopped("porter", "its task is done")])
    first = picked(operator, *WORK[0])
    full_life(publisher, first)
    found = [first]
    for number in range(1, jobs):
        description, agent = WORK[number % len(WORK)]
        job = (
            picked(operator, description, f"{agent}-{number}")
            if number % 9
            else register(operator, description=description)
        )
        found.append(job)
        if number % 9 == 0:
            continue
        steps = [event(job, 1, "started", "session is up")]
        steps += [event(job, seq, "progress", STEPS[seq % 5]) for seq in range(2, 2 + number % 4)]
        ends = {
            0: ("completed", "done, the report is in the archive"),
            1: ("error", "the service answered 503"),
        }
        if number % 5 in ends and number % 4:
            steps.append(event(job, 2 + number % 4, *ends[number % 5]))
        append(publisher, steps)
    reject(publisher, found)
    append(publisher, [message("writer", "builder", f"draft {n} is ready") for n in range(7)])
    append(publisher, [message("analyst", "operator", "may I drop the old index?", "high")])
    append(publisher, [message("indexer", "writer", f"page {n}") for n in range(3)])
    return found


def write_tables(settings: Settings, keyring: Keyring, offsets: dict[int, int]) -> None:
    """The view tables as of these offsets, as far as anybody sees who asks how far they are."""
    FoldedLog(keyring).write_entries(settings, offsets)


def reject(publisher: Publisher, jobs: list[dict[str, Any]]) -> None:
    """Events of several kinds that nobody lets pass."""
    for job in jobs[2:8]:
        append(publisher, [event({**job, "secret": "wrong"}, 9, "progress", "forged")])
    for job in jobs[2:5]:
        append(publisher, [raw_event(job["job_id"], b'{"schema_version": 1, "seq": "one"}')])
    append(
        publisher, [raw_event("deadbeef", b'{"schema_version": 1}'), event(jobs[0], 6, "progress", "too late")]
    )
    append(publisher, [event(jobs[1], 70, "progress", "x", schema_version=2)])
