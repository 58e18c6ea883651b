"""Random records of every stream with every kind of trouble, put into Kafka past all doors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import confluent_kafka
from kafka import KafkaProducer

from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import partition_for
from schemas.log_access.kafka_clients import client_options, librdkafka_options
from schemas.settings.settings import Settings
from schemas.streams.job.job_event import JOB_EVENT
from schemas.streams.job.job_registry import cancellation_record, pick_record, registration_record
from schemas.streams.mailboxes.mailbox_requests import (
    ack_record,
    claim_record,
    clearing_record,
    expiry_record,
    lease_record,
    nack_record,
    read_record,
    reclaim_record,
)
from schemas.streams.mailboxes.message import Message, posting_record
from schemas.streams.principal.principals import addition_record, revocation_record
from schemas.streams.session.session_registry import (
    SessionCreation,
    SessionJobAssigned,
    SessionJobEnded,
    SessionResumption,
    SessionStop,
    session_record,
)
from schemas.wire.record import OutgoingRecord, Record
from schemas.wire.signing import sign_event
from schemas.wire.strict_json import canonical

JOBS = [f"{n:08x}" for n in range(0xA0, 0xB4)]
SESSIONS = ["builder", "tester"]
SECRET = "a secret of the tests"


class _AnyBytes(str):
    """A header's name whose bytes are what they are: no door makes such."""

    __slots__ = ("raw",)
    raw: bytes

    def encode(self, *_: Any) -> bytes:
        return self.raw


def any_name(raw: bytes) -> str:
    """A header's name made of any bytes."""
    name = _AnyBytes(raw.decode("utf-8", "replace"))
    name.raw = raw
    return name


class Raw(NamedTuple):
    """A record as it goes to Kafka."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def raw(record: OutgoingRecord) -> Raw:
    """A well-made record as it goes to Kafka."""
    return Raw(record.key, record.value, list(record.headers()))


def append_raw(settings: Settings, records: Sequence[Raw]) -> list[Record]:
    """Append the records, those with a null header last; returns them as Kafka has them, by partition and
    offset.
    """
    plain = [one for one in records if all(value is not None for _, value in one.headers)]
    others = [one for one in records if any(value is None for _, value in one.headers)]
    found = [*_append_plain(settings, plain), *_append_with_nulls(settings, others)]
    return sorted(found, key=lambda record: (record.partition, record.offset))


def _append_plain(settings: Settings, records: Sequence[Raw]) -> list[Record]:
    kafka = settings.kafka
    producer = KafkaProducer(**client_options(kafka), linger_ms=1)
    try:
        sent = [
            producer.send(kafka.topic, one.value, one.key, one.headers, _partition(one, settings))
            for one in records
        ]
        told = [future.get(30) for future in sent]
    finally:
        producer.close()
    return [
        _record(one, kafka.topic, where.partition, where.offset, where.timestamp)
        for one, where in zip(records, told, strict=True)
    ]


def _append_with_nulls(settings: Settings, records: Sequence[Raw]) -> list[Record]:
    """With another producer: kafka-python's takes no null."""
    kafka = settings.kafka
    producer = confluent_kafka.Producer({**librdkafka_options(kafka)})
    told: dict[int, Any] = {}
    for number, one in enumerate(records):
        producer.produce(
            kafka.topic,
            one.value,
            one.key,
            _partition(one, settings),
            headers=one.headers,
            on_delivery=lambda error, message, number=number: told.setdefault(number, message),
        )
    assert producer.flush(30) == 0
    return [
        _record(one, kafka.topic, told[n].partition(), told[n].offset(), told[n].timestamp()[1])
        for n, one in enumerate(records)
    ]


def _record(one: Raw, topic: str, partition: int, offset: int, moment_ms: int) -> Record:
    names = tuple(str(name) for name, _ in one.headers)
    values = tuple(value for _, value in one.headers)
    return Record(topic, partition, offset, moment_ms * 1000, one.key, one.value, names, values)


def _partition(record: Raw, settings: Settings) -> int:
    return partition_for(record.key or b"", settings.kafka.partitions)


def trouble(count: int, keyring: Keyring, seed: int = 1) -> list[Raw]:
    """`count` random records; the same seed and keyring give the same."""
    source = _Source(random.Random(seed), keyring)
    return [source.next() for _ in range(count)]


class _Source:
    def __init__(self, rng: random.Random, keyring: Keyring) -> None:
        self._rng = rng
        self._keyring = keyring
        self._past: list[Raw] = []
        self._seqs = dict.fromkeys(JOBS, 0)

    def next(self) -> Raw:
        roll = self._rng.random()
        if self._past and roll < 0.15:
            return self._rng.choice(self._past)
        if roll < 0.30:
            return self._spoilt(self._event())
        makers = [self._event] * 6 + [
            self._of_job,
            self._of_session,
            self._message,
            self._of_mailbox,
            self._principal,
        ]
        made = self._rng.choice(makers)()
        self._past.append(made)
        return made

    def _event(self) -> Raw:
        rng = self._rng
        job = rng.choice(JOBS)
        seq = self._seqs[job] = max(1, self._seqs[job] + rng.choice([1, 1, 1, 1, 3, 0, -2]))
        kinds = ["progress"] * 60 + ["started", "completed", "error", "permission_required"]
        event = {
            "schema_version": rng.choice([1] * 30 + [2, "1"]),
            "seq": seq,
            "job_id": job if rng.random() < 0.97 else JOBS[0],
            "event": rng.choice(kinds),
            "timestamp": rng.choice(["2026-11-21T10:00:00Z"] * 20 + ["yesterday"]),
            "detail": rng.choice(["3/10", "now at /home/ann/x", "PASSWORD=hunter2", "naïve ☃", "x" * 600]),
            "data": rng.choice([{}, {"n": 1.5}, {"auth_token": "t"}, {"deep": [[{}]]}]),
        }
        secret = SECRET if rng.random() < 0.95 else "a forger's"
        return raw(self._outgoing(job, canonical(sign_event(event, secret))))

    def _outgoing(self, job: str, value: bytes) -> OutgoingRecord:
        ce_id = f"{self._rng.getrandbits(64):016x}"
        return OutgoingRecord(f"job/{job}", ce_id, "mqtt", "unverified", JOB_EVENT, value)

    def _of_job(self) -> Raw:
        rng, job = self._rng, self._rng.choice(JOBS)
        kind = rng.choice(["register", "register", "pick", "cancel"])
        if kind == "pick":
            return raw(pick_record(job, rng.choice(SESSIONS), principal="builder"))
        if kind == "cancel":
            return raw(cancellation_record(job, request_id=rng.choice(["r1", "r2"]), reason=rng.choice("ab")))
        session = rng.choice([None, None, *SESSIONS])
        return raw(registration_record(job, SECRET, f"job {rng.choice('xy')}", self._keyring, session=session))

    def _of_session(self) -> Raw:
        rng = self._rng
        name, request = rng.choice(SESSIONS), f"q{rng.randrange(12)}"
        body = rng.choice(
            [
                SessionCreation(
                    session=name, request_id=request, host="here", for_job=rng.choice([None, *JOBS])
                ),
                SessionStop(session=name, request_id=request, mode=rng.choice(["stop", "hard", "soft"])),
                SessionResumption(session=name, request_id=request),
                SessionJobAssigned(session=name, job_id=rng.choice(JOBS)),
                SessionJobEnded(session=name, job_id=rng.choice(JOBS), outcome="completed"),
            ]
        )
        return raw(session_record(body, door="http", principal="operator"))

    def _message(self) -> Raw:
        document = {
            "message_id": f"m{self._rng.randrange(40)}",
            "from": "ann",
            "to": self._rng.choice(["bo", "cy"]),
            "kind": "message",
            "body": self._rng.choice(["one", "two"]),
        }
        return raw(posting_record(Message.model_validate(document), door="http", principal="ann"))

    def _of_mailbox(self) -> Raw:
        rng, by = self._rng, {"door": "http", "principal": "bo"}
        mailbox, message_id = ("default", rng.choice(["bo", "cy"])), f"m{rng.randrange(40)}"
        request = rng.choice(["l1", "l2", "l3"])
        made = rng.choice(
            [
                lease_record(*mailbox, request, rng.choice([2, 1000]), rng.choice([1, 60_000]), **by),
                claim_record(*mailbox, rng.choice(["c1", "c2"]), 2, **by),
                ack_record(*mailbox, message_id, request, **by),
                nack_record(*mailbox, message_id, request, rng.choice(["", "busy"]), **by),
                reclaim_record(*mailbox, message_id, request, **by),
                read_record(*mailbox, message_id, **by),
                expiry_record(*mailbox, message_id, **by),
                clearing_record(*mailbox, "x1", **by),
            ]
        )
        return raw(made)

    def _principal(self) -> Raw:
        name = self._rng.choice(["ann", "bo", "cy"])
        if self._rng.random() < 0.3:
            return raw(revocation_record(name, principal="operator"))
        return raw(addition_record(name, "worker", f"token of {name}", principal="operator"))

    def _spoilt(self, good: Raw) -> Raw:
        rng, headers = self._rng, good.headers
        odd: Sequence[Raw] = [
            good._replace(value=rng.randbytes(rng.randrange(40))),
            good._replace(value=None),
            good._replace(value=b"[1]"),
            good._replace(value=b'{"a":1,"a":2}'),
            good._replace(value=b"[" * 3000),
            good._replace(key=None),
            good._replace(value=b"x" * 3000, headers=_retyped(headers, b"job.unheard")),
            good._replace(key=rng.randbytes(8)),
            good._replace(key=b"thread/x", headers=_subject(headers, b"thread/x")),
            good._replace(key=b"control/topology", headers=_subject(headers, b"control/topology")),
            good._replace(key=b"refused/mqtt", headers=_subject(headers, b"refused/mqtt")),
            good._replace(headers=[]),
            good._replace(headers=headers[:-3]),
            good._replace(headers=[*headers, headers[1]]),
            good._replace(headers=[*headers, ("x-null", None)]),
            good._replace(headers=[(name, None) for name, _ in headers]),
            good._replace(headers=[*headers, (any_name(b"x\xff\xfe"), b"1")]),
            good._replace(headers=[*headers, (any_name(b"x\0\xff"), b"1")]),
            good._replace(headers=[*headers, ("ce_id\0", b"another")]),
            good._replace(headers=[(f"{name}\0tail", value) for name, value in headers]),
            good._replace(headers=[*headers, ("ce_bodysize", b"9999999"), ("ce_bodysha256", b"ab")]),
        ]
        return rng.choice(odd)


def _retyped(headers: list[tuple[str, bytes | None]], kind: bytes) -> list[tuple[str, bytes | None]]:
    return [(name, kind if name == "ce_type" else value) for name, value in headers]


def _subject(headers: list[tuple[str, bytes | None]], key: bytes) -> list[tuple[str, bytes | None]]:
    return [(name, key if name == "ce_subject" else value) for name, value in headers]
