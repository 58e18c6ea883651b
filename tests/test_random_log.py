"""The random log comes through every step of a message, and fold and model agree on each (JE-09)."""

from __future__ import annotations

import random

import msgspec
import pytest

from schemas.fold.entries import Entries
from schemas.streams.fold import settle
from schemas.streams.mailboxes.message import LEASED
from schemas.wire.record import Record
from tests.faults.mailbox_states import ModelledMailboxes
from tests.random_log import RandomLog
from tests.raw_records import Raw
from tests.schemas.job_records import KEYRING, START_US

RECORDS = 30_000
# Type, verdict or reason, and the status that a row or the record has.
REACHED = {
    *(("posted", said, "unread") for said in ("accepted", "duplicate", "seq_conflict")),
    *(("claimed", "accepted", status) for status in ("claimed", "expired", "dead", None)),
    *(("leased", "accepted", status) for status in ("leased", "expired", "dead", None)),
    *(("extended", said, "leased") for said in ("accepted", "illegal_transition", "duplicate", "seq_conflict")),
    *((kind, "accepted", status) for kind in ("nacked", "reclaimed") for status in ("unread", "dead")),
    *((kind, "accepted", status) for kind, status in (("acked", "claimed"), ("read", "read"))),
    ("read", "illegal_transition", "leased"),
}
# The same of topics, without their rows.
OF_TOPICS = {
    *(("subscribed", said, "subscribed") for said in ("accepted", "duplicate", "seq_conflict")),
    *(("unsubscribed", said, "unsubscribed") for said in ("accepted", "duplicate", "seq_conflict")),
    ("unsubscribed", "duplicate", "subscribed"),
    *(("published", said, "publishing") for said in ("accepted", "duplicate", "seq_conflict")),
    *(("published", said, "delivered") for said in ("duplicate", "seq_conflict")),
    *(("delivered", said, "delivered") for said in ("accepted", "duplicate")),
}


def logged(made: Raw, offset: int, now_us: int) -> Record:
    """The record as Kafka would give it at this time."""
    names, values = tuple(name for name, _ in made.headers), tuple(value for _, value in made.headers)
    return Record("t", 0, offset, now_us, made.key, made.value, names, values)


@pytest.mark.long
@pytest.mark.requirement("DL-24")
def test_the_random_log_comes_through_every_step_of_a_topic() -> None:
    streams: dict[bytes, Entries] = {}
    reached = set[tuple[str, str | None, str | None]]()
    for offset, made in enumerate(RandomLog(1, KEYRING).records(RECORDS)):
        record = logged(made, offset, START_US + offset * 1000)
        settled = settle(record, streams.setdefault(made.key or b"", Entries()), KEYRING, Entries())
        if settled.stream_kind == "topic" and settled.envelope is not None:
            kind = settled.envelope.type.removeprefix("topic.")
            reached.add((kind, settled.reason or settled.verdict, settled.status_after))
    assert OF_TOPICS - reached == set()


@pytest.mark.long
@pytest.mark.requirement("JE-09")
@pytest.mark.requirement("DL-03")
@pytest.mark.requirement("DL-05")
def test_fold_and_model_agree_on_the_random_log_which_comes_through_every_step_of_a_message() -> None:
    draw, now_us, mailboxes = random.Random(1), START_US, ModelledMailboxes()
    streams: dict[bytes, Entries] = {}
    rows: dict[str, dict[str, object]] = {}
    held: dict[str, object] = {}
    doors, reasons, limits, replays = set[int](), set[object](), set[object](), 0
    for offset, made in enumerate(RandomLog(5, KEYRING).records(RECORDS)):
        now_us += draw.choice([0, 1_000, 5_000, 50_000])
        record = logged(made, offset, now_us)
        settled = settle(record, streams.setdefault(made.key or b"", Entries()), KEYRING, Entries())
        told = (settled.verdict, settled.reason, settled.status_after)
        assert mailboxes.differs(record, told) is None
        for change in settled.changes:
            if change.view == "mailbox":
                rows[change.key] = row = msgspec.structs.asdict(change.row)
                held.pop(change.key, None)
                if row["status"] == LEASED:
                    held[change.key] = row["handed_to"]
                reasons.add(row["last_reason"])
                limits |= {row["attempts"]} if row["status"] == "dead" else set()
                replays += row["replay_of"] is not None
        doors.add(len(set(held.values())))
    assert rows == mailboxes.rows()
    assert REACHED - mailboxes.reached == set()
    assert reasons >= {None, "no disk", "the lease ran out"}
    assert limits >= {1, 2, 3, 4} and replays
    assert max(doors) >= 3, "consumers at several doors hold messages at once"


def reached_in(kind: str, step_us: int) -> set[tuple[str, str]]:
    """The record types of one kind of stream in a random log, each with the reasons or verdicts that it gets.

    The records are `step_us` microseconds apart.
    """
    streams: dict[bytes, Entries] = {}
    reached = set[tuple[str, str]]()
    for offset, made in enumerate(RandomLog(2, KEYRING).records(RECORDS)):
        if made.key is not None and made.key.startswith(f"{kind}/".encode()):
            record = logged(made, offset, START_US + offset * step_us)
            settled = settle(record, streams.setdefault(made.key, Entries()), KEYRING, Entries())
            assert settled.envelope is not None
            reached.add((settled.envelope.type, settled.reason or settled.verdict))
    return reached


@pytest.mark.long
@pytest.mark.requirement("DL-23")
def test_the_random_log_comes_through_the_requests_about_schedules_and_refused_runs() -> None:
    requests = ("accepted", "duplicate", "seq_conflict")
    assert reached_in("schedule", 10_000) >= {
        *(("schedule.set", said) for said in requests),
        *(("schedule.removed", said) for said in (*requests, "illegal_transition", "unknown_stream")),
        *((kind, "illegal_transition") for kind in ("schedule.ran", "schedule.missed", "schedule.refused")),
    }


@pytest.mark.long
@pytest.mark.requirement("DL-26")
def test_the_random_log_comes_through_uploads_and_early_removals_of_blobs() -> None:
    stored = {("blob.stored", said) for said in ("accepted", "duplicate", "seq_conflict")}
    assert reached_in("blob", 1_000) >= {*stored, ("blob.removed", "illegal_transition")}
