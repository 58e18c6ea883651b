"""A random log with every kind of trouble: what doors append, what strangers send, and what nobody should.

The same seed gives the same records. Nothing here knows the fold: the jobs' seqs are counted so that most
events make sense, and the rest is left to chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from schemas.keys.record_macs import GATEWAY
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.agents import agent_registry
from schemas.streams.job.job_registry import (
    JOB_EVENT,
    JobCancellation,
    JobPick,
    JobRegistration,
    JobSecretRotation,
)
from schemas.streams.principal.principals import (
    OPERATOR,
    ROLES,
    PrincipalAddition,
    PrincipalRevocation,
    token_hash,
)
from schemas.streams.refused.refusal import Refusal
from schemas.streams.session import sessions
from schemas.wire.record import OutgoingRecord, oversized, refused_stream
from tests.jobs.topic_load import raw_event
from tests.random_mailboxes import RandomMailboxes
from tests.random_records import (
    blob_record,
    mqtt_agent_record,
    opened_thread,
    organism_change,
    schedule_record,
    topic_record,
    webhook_record,
)
from tests.raw_records import Raw, any_name, raw, with_mac
from tests.schemas.hub_records import public_key
from tests.schemas.job_records import signed
from trunkline_agent.wire.signing import key_id_of
from trunkline_agent.wire.strict_json import canonical

WORKERS = [f"worker-{n}" for n in range(12)]


class _Job:
    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.secret = self.first_secret = f"secret of {job_id}"
        self.old_secret = self.secret
        self.next_seq = 1


class RandomLog:
    """`records(count)` may be called again: it goes on with the same jobs, sessions and principals."""

    def __init__(self, seed: int, keyring: Keyring) -> None:
        self._draw = draw = random.Random(seed)
        self._keyring = keyring
        self._mac_key = keyring.mac_key(GATEWAY)
        self._jobs: list[_Job] = []
        # Few, so that much of what is sent about a message finds it there.
        mailboxes = RandomMailboxes(self._draw, WORKERS[:4], WORKERS)
        self._sent: list[Raw] = []
        self._actions: list[tuple[int, Callable[[], Raw]]] = [
            (10, self._register),
            (7, self._pick),
            (36, self._event),
            (5, self._late_event),
            (3, self._end),
            (4, self._forged),
            (3, self._other_content),
            (3, self._troubled_event),
            (1, self._unknown_job),
            (9, self._again),
            (2, self._cancel),
            (4, self._rotation),
            (6, self._session),
            (2, self._principal),
            (4, self._participant),
            (4, lambda: raw(mqtt_agent_record(draw, keyring, WORKERS[:4]))),
            (2, lambda: raw(organism_change(draw))),
            (2, lambda: raw(opened_thread(draw))),
            (4, lambda: raw(topic_record(draw, WORKERS[:5]))),
            (2, lambda: raw(schedule_record(draw))),
            (2, lambda: raw(blob_record(draw))),
            (2, lambda: raw(webhook_record(draw, keyring))),
            (5, mailboxes.message),
            (4, mailboxes.hand_out),
            (8, mailboxes.handed_out),
            (1, self._refusal),
            (3, self._rubbish),
        ]

    def records(self, count: int) -> Iterator[Raw]:
        """The next `count` records."""
        weights = [weight for weight, _ in self._actions]
        for _ in range(count):
            ((_, make),) = self._draw.choices(self._actions, weights)
            record = with_mac(make() if self._jobs else self._register(), self._mac_key)
            if len(self._sent) < 5000:
                self._sent.append(record)
            else:
                self._sent[self._draw.randrange(5000)] = record
            yield record

    def _job(self) -> _Job:
        # Mostly a young job, so that many run at once and some get to their end.
        return self._draw.choice(self._jobs[-40:] if self._draw.random() < 0.9 else self._jobs)

    def _register(self) -> Raw:
        again = bool(self._jobs) and self._draw.random() < 0.05
        job = self._job() if again else _Job(f"{self._draw.getrandbits(32):08x}")
        if not again:
            self._jobs.append(job)
        wanted = self._draw.choice(WORKERS) if self._draw.random() < 0.2 else None
        description = self._draw.choice(["count the stars", "read, think, answer", "Grüße ☃"])
        record = JobRegistration(
            sealed_secret=self._keyring.seal(job.first_secret.encode(), job_secret_purpose(job.job_id)),
            job_id=job.job_id,
            description=description,
            session=wanted,
        ).record(door="cli", principal="operator")
        return raw(record)

    def _pick(self) -> Raw:
        session = self._draw.choice(WORKERS)
        return raw(JobPick(job_id=self._job().job_id, session=session).record(principal=session, door="http"))

    def _event(self) -> Raw:
        job = self._job()
        kind = "started" if job.next_seq == 1 and self._draw.random() < 0.8 else "progress"
        record = self._signed(job, job.next_seq, kind)
        job.next_seq += 1
        return record

    def _late_event(self) -> Raw:
        job = self._job()
        job.next_seq += 2
        seq = self._draw.choice([max(1, job.next_seq - 2), job.next_seq + 300, max(1, job.next_seq - 300)])
        return self._signed(job, seq, self._draw.choice(["progress", "permission_required", "started"]))

    def _end(self) -> Raw:
        job = self._job()
        record = self._signed(job, job.next_seq, self._draw.choice(["completed", "error"]))
        job.next_seq += 1
        return record

    def _forged(self) -> Raw:
        job = self._job()
        return self._signed(job, job.next_seq, "completed", secret="somebody else's secret")

    def _other_content(self) -> Raw:
        job = self._job()
        return self._signed(job, max(1, job.next_seq - 1), "progress", detail="another content")

    def _troubled_event(self) -> Raw:
        job = self._job()
        changed: dict[str, Any] = self._draw.choice(
            [
                {"schema_version": 2},
                {"event": "exploded"},
                {"detail": "see /home/me/.ssh/id_rsa"},
                {"data": {"auth_token": "canary-token"}},
                {"data": {"ratio": 0.1, "deep": {"er": [1.5, None, True]}}},
                {"timestamp": "yesterday"},
                {"job_id": "ffffffff"},
            ]
        )
        return self._signed(job, job.next_seq, "progress", **changed)

    def _unknown_job(self) -> Raw:
        return self._signed(_Job(f"{self._draw.getrandbits(32):08x}"), 1, "started")

    def _again(self) -> Raw:
        return self._draw.choice(self._sent)

    def _cancel(self) -> Raw:
        request = f"request-{self._draw.randrange(500)}"
        reason = self._draw.choice(["", "no longer needed"])
        return raw(
            JobCancellation(job_id=self._job().job_id, request_id=request, reason=reason).record(
                door="cli", principal="operator"
            )
        )

    def _rotation(self) -> Raw:
        job, request = self._job(), f"request-{self._draw.randrange(500)}"
        job.old_secret, job.secret = job.secret, f"secret {self._draw.randrange(1000)} of {job.job_id}"
        # Some end before the next event is logged, some while the log is written, some never.
        overlap_ms = self._draw.choice([0, 500, 500, 3_600_000])
        return raw(
            JobSecretRotation(
                sealed_secret=self._keyring.seal(job.secret.encode(), job_secret_purpose(job.job_id)),
                job_id=job.job_id,
                overlap_ms=overlap_ms,
                request_id=request,
            ).record(door="cli", principal="operator")
        )

    def _session(self) -> Raw:
        name = self._draw.choice(WORKERS) if self._draw.random() < 0.6 else f"s{self._draw.randrange(60)}"
        job_id, request = self._job().job_id, f"request-{self._draw.randrange(300)}"
        body = self._draw.choice(
            [
                sessions.SessionCreation(session=name, request_id=request, for_job=job_id, host="here"),
                sessions.SessionCreation(session=name, request_id=request, handle="tmux/trunkline/x"),
                sessions.SessionJobAssigned(session=name, job_id=job_id),
                sessions.SessionJobEnded(session=name, job_id=job_id, outcome="completed"),
                sessions.SessionStop(session=name, request_id=request, mode="stop", reason="lunch"),
                sessions.SessionStop(session=name, request_id=request, mode="soft"),
                sessions.SessionResumption(session=name, request_id=request),
            ]
        )
        if self._draw.random() < 0.01:
            body = sessions.SessionStop(session=name, request_id=request, mode="hard", capture_id="capture-1")
        return raw(body.record(door="http", principal="operator"))

    def _principal(self) -> Raw:
        name = f"principal-{self._draw.randrange(30)}"
        if self._draw.random() < 0.3:
            return raw(PrincipalRevocation(principal=name).record(door="http", principal=OPERATOR))
        return raw(
            PrincipalAddition(
                principal=name,
                role=self._draw.choice(ROLES),
                token_sha256=token_hash(f"token-{self._draw.randrange(40)}"),
            ).record(door="http", principal=OPERATOR)
        )

    def _participant(self) -> Raw:
        roll, name = self._draw.random(), f"agent-{self._draw.randrange(6)}"
        by = {"agent_name": name, "request_id": f"request-{self._draw.randrange(300)}"}
        key = {"public_key": public_key(str(self._draw.randrange(12)))}
        body: Any
        if roll < 0.2:
            body = agent_registry.AgentJoined(**by, **key, task="count the stars", capabilities=["count"])
        elif roll < 0.35:
            body = agent_registry.AgentKeyRegistered(
                **by, **key, overlap_ms=self._draw.choice([0, 500, 60_000])
            )
        elif roll < 0.4:
            body = agent_registry.AgentKeyRemoved(**by, key_id=key_id_of(key["public_key"]))
        elif roll < 0.6:
            body = agent_registry.AgentUpdated(
                **by, status=self._draw.choice(["idle", "working", "blocked", None])
            )
        elif roll < 0.65:
            body = agent_registry.AgentStopped(**by, reason="its time was over")
        else:
            signature = f"{self._draw.randrange(200):04x}" + "5e" * 30
            body = agent_registry.AgentCalled(agent_name=name, signature=signature, tool="send_to_agent")
        return raw(body.record(door="mcp", principal=name))

    def _refusal(self) -> Raw:
        refusal = Refusal(
            request_id=f"r{self._draw.getrandbits(40)}",
            reason=self._draw.choice(["unauthorized", "policy", "unknown_recipient"]),
            why="a worker may not register jobs",
            route="POST /api/hub/jobs",
        )
        return raw(refusal.record(door="http", principal=refusal.principal))

    def _rubbish(self) -> Raw:
        job = self._job()
        good = raw(raw_event(job.job_id, b"{}"))
        return self._draw.choice(
            [
                Raw(None, self._draw.randbytes(20), []),
                Raw(good.key, None, good.headers),
                Raw(good.key, self._draw.randbytes(30), good.headers),
                Raw(good.key, b'{"schema_version":1,"schema_version":1}', good.headers),
                Raw(good.key, b"[" * 100, good.headers),
                Raw(good.key, good.value, good.headers[:3]),
                Raw(good.key, good.value, [*good.headers, good.headers[1]]),
                Raw(b"comet/halley", good.value, [*good.headers[:5], ("ce_subject", b"comet/halley")]),
                Raw(b"job/../../etc", good.value, good.headers),
                raw(oversized(raw_event(job.job_id, b"x" * 5000), 1000)),
                raw(OutgoingRecord(refused_stream("mqtt"), "x", "mqtt", "unverified", JOB_EVENT, b"?")),
            ]
        )

    def _signed(self, job: _Job, seq: int, kind: str, secret: str | None = None, **changed: Any) -> Raw:
        own = job.old_secret if self._draw.random() < 0.1 else job.secret
        event = signed(seq, kind, **{"secret": secret or own, "job_id": job.job_id, **changed})
        return raw(raw_event(job.job_id, canonical(event)))


def trouble(count: int, keyring: Keyring, seed: int = 1) -> list[Raw]:
    """Return `count` random records, of which some are spoilt; the same seed and keyring give the same."""
    draw = random.Random(seed)
    return [
        _spoilt(draw, one) if one.headers and draw.random() < 0.15 else one
        for one in RandomLog(seed, keyring).records(count)
    ]


def _spoilt(draw: random.Random, good: Raw) -> Raw:
    headers = good.headers
    odd: Sequence[Raw] = [
        good._replace(value=draw.randbytes(draw.randrange(40))),
        good._replace(value=None),
        good._replace(value=b"[1]"),
        good._replace(value=b'{"a":1,"a":2}'),
        good._replace(value=b"[" * 3000),
        good._replace(key=None),
        good._replace(value=b"x" * 3000, headers=_retyped(headers, b"job.unheard")),
        good._replace(key=draw.randbytes(8)),
        good._replace(key=b"thread/x", headers=_subject(headers, b"thread/x")),
        good._replace(key=b"control/topology", headers=_subject(headers, b"control/topology")),
        good._replace(key=b"refused/mqtt", headers=_subject(headers, b"refused/mqtt")),
        good._replace(headers=[]),
        good._replace(headers=headers[:-3]),
        good._replace(headers=headers[:7]),
        good._replace(headers=[*headers[:-1], (headers[-1][0], b"0" * 32)]),
        good._replace(headers=[*headers, headers[1]]),
        good._replace(headers=[*headers, ("x-null", None)]),
        good._replace(headers=[(name, None) for name, _ in headers]),
        good._replace(headers=[*headers, (any_name(b"x\xff\xfe"), b"1")]),
        good._replace(headers=[*headers, (any_name(b"x\0\xff"), b"1")]),
        good._replace(headers=[*headers, ("ce_id\0", b"another")]),
        good._replace(headers=[(f"{name}\0tail", value) for name, value in headers]),
        good._replace(headers=[*headers, ("ce_bodysize", b"9999999"), ("ce_bodysha256", b"ab")]),
    ]
    return draw.choice(odd)


def _retyped(headers: list[tuple[str, bytes | None]], kind: bytes) -> list[tuple[str, bytes | None]]:
    return [(name, kind if name == "ce_type" else value) for name, value in headers]


def _subject(headers: list[tuple[str, bytes | None]], key: bytes) -> list[tuple[str, bytes | None]]:
    return [(name, key if name == "ce_subject" else value) for name, value in headers]
