"""The fold of a job and the model of it agree on every sequence of records (JE-02 to JE-08, JE-11), also
when its secret is rotated.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.fold import memories
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.fold import settle
from tests.schemas.job_records import (
    JOB_ID,
    KEYRING,
    NOTATIONS,
    OTHER_SECRET,
    SECRET,
    SENDER,
    cancellation,
    event,
    make_record,
    pick,
    registration,
    rotation,
    sealed,
    signed,
    written,
)
from tests.schemas.streams.job_model import UNSAFE_DETAILS, Expected, JobModel

pytestmark = [pytest.mark.requirement(i) for i in ("JE-02", "JE-03", "JE-06", "JE-07", "JE-08", "JE-11")]

THIRD_SECRET = "a third secret of the tests"
SECRETS = {sealed(one): one for one in (SECRET, OTHER_SECRET, THIRD_SECRET)}
# A record is logged a millisecond after the one before it.
OVERLAPS_MS = (0, 1, 4, 9, 60_000, 60_000)
ODD_ROTATIONS = (
    rotation(sealed_secret="k1:nothing"),
    rotation(sealed_secret=sealed(OTHER_SECRET, "00000000")),
    rotation(overlap_ms=-1),
    rotation(overlap_ms=2_592_000_001),
    rotation(overlap_ms=True),
    rotation(more=1),
    rotation(job_id="00000000"),
)
KINDS = ("started", "progress", "permission_required", "completed", "error")
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"x": 1.5, "y": -0.0, "z": 1e16},
    {"ключ": "значение", "\U0001f600": "\ud7ff\U00010000\ue000"},
    {"n": [2**63 - 1, -(2**63), {"deep": [None, True, '\u007f"\\/\b']}]},
)
REGISTRATIONS = (
    registration(),
    registration(session="s1", broker={"host": "mq"}),
    registration(sealed_secret=sealed(OTHER_SECRET)),
    registration(schema_version=2),
    registration(job_id="00000000"),
    registration(surprise=1),
    registration(description=7),
    registration(description="a\u0000b"),
)
PICKS = (
    *(pick(session) for session in ("s1", "s2", "s3")),
    pick("../s1"),
    pick("x" * 129),
    pick(""),
    pick() | {"session": 7},
    pick(more=1),
    pick(job_id="00000000"),
    {"schema_version": 1, "job_id": JOB_ID},
)
POISON = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe{}",
    b'{"a":NaN}',
    b'{"a":-Infinity}',
    b'{"a":1e999}',
    b'{"a":1,"a":1}',
    b'{"a":9223372036854775808}',
    b'{"a":"\\ud800"}',
    b'{"\\udfff":1}',
    b"[" * 65 + b"]" * 65,
    b'{"a":01}',
    b"{}x",
    b"\xef\xbb\xbf{}",
)
FAULTS: tuple[dict[str, Any], ...] = (
    {"schema_version": 2},
    {"schema_version": True},
    {"schema_version": 1.0},
    {"schema_version": None},
    {"job_id": "ffffffff"},
    {"job_id": 1},
    {"seq": 0},
    {"seq": -1},
    {"seq": 1.0},
    {"seq": True},
    {"seq": "1"},
    {"event": "paused"},
    {"event": ["started"]},
    {"timestamp": "2026-11-21T10:00:00"},
    {"timestamp": "2026-02-30T10:00:00Z"},
    {"timestamp": 1},
    {"detail": "a\nb"},
    {"detail": "\u0085"},
    {"detail": "x" * 501},
    {"detail": None},
    {"data": []},
    {"data": None},
)


class Sent(NamedTuple):
    """One record as the test sends it, before it has a place in the log."""

    record_type: str
    ce_id: str
    value: bytes
    cut: bool = False


@st.composite
def events(draw: st.DrawFn, highest_seq: int, secrets: tuple[str, ...] = (SECRET,)) -> Sent:
    """An event: mostly right, sometimes wrong in one field, badly signed, or with a token."""
    seq, kind = draw(st.integers(1, highest_seq)), draw(st.sampled_from(KINDS[:3] * 4 + KINDS))
    changed = dict(draw(st.sampled_from(EXTRAS)))
    changed["detail"] = draw(st.sampled_from(("3/10", "ü€\U0001f600", "", "x" * 500, *UNSAFE_DETAILS)))
    changed["data"] = dict(draw(st.sampled_from(EXTRAS)))
    fate = draw(st.sampled_from(("right",) * 12 + ("fault", "token", "forged", "unsigned", "odd signature")))
    if fate == "fault":
        changed.update(draw(st.sampled_from(FAULTS)))
    if fate == "token":
        changed["data"]["auth_token"] = draw(st.sampled_from(("t", None, 1)))
    body = event(seq, kind, **changed)
    if isinstance(body["data"], dict) and fate != "unsigned":
        right_one = draw(st.sampled_from(secrets))
        body = signed(seq, kind, secret="nobody's" if fate == "forged" else right_one, **changed)
        if fate == "odd signature":
            right = body["data"]["hmac_sig"]
            body["data"]["hmac_sig"] = draw(
                st.sampled_from((right.upper() + "A", right[:-1], None, 1, "é" * 64))
            )
    return Sent("job.event", f"e{seq}-{kind}", written(body, draw(st.sampled_from(sorted(NOTATIONS)))))


def sequences(highest_seq: int, longest: int) -> st.SearchStrategy[list[Sent]]:
    """Sequences of records of one job. Most begin with its registration."""
    notation = st.sampled_from(sorted(NOTATIONS))
    others = st.one_of(
        st.builds(
            lambda body, n: Sent("job.registered", "r", written(body, n)),
            st.sampled_from(REGISTRATIONS),
            notation,
        ),
        st.builds(
            lambda i: Sent("job.cancelled", f"c{i}", written(cancellation(f"c{i}"))),
            st.integers(1, 2),
        ),
        st.builds(
            lambda value, t: Sent(t, "p", value),
            st.sampled_from(POISON),
            st.sampled_from(("job.event", "job.registered", "job.picked", "job.cancelled", "message.posted")),
        ),
        st.builds(lambda s: s._replace(cut=True), events(highest_seq)),
        st.builds(lambda s: s._replace(record_type="task.created"), events(highest_seq)),
    )
    picks = st.builds(lambda b: Sent("job.picked", "p", written(b)), st.sampled_from(PICKS[:3] * 4 + PICKS))
    one = st.integers(0, 9).flatmap(lambda n: (others, picks)[n] if n < 2 else events(highest_seq))
    plain, wanted = ([Sent("job.registered", "r", written(body))] for body in REGISTRATIONS[:2])
    # A job starts with its registration, mostly, and often with a few picks before its first event.
    first = st.sampled_from([plain] * 4 + [wanted, []])
    first = st.builds(lambda a, b: a + b, first, st.lists(picks, max_size=2))
    return st.builds(lambda a, b: a + b, first, st.lists(one, max_size=longest)).flatmap(_with_repeats)


@st.composite
def rotations(draw: st.DrawFn) -> Sent:
    """A new secret, now and then one that the job has or had, or a request that was made before."""
    if draw(st.integers(0, 7)) == 0:
        return Sent("job.secret_rotated", "odd", written(draw(st.sampled_from(ODD_ROTATIONS))))
    number, overlap_ms = draw(st.integers(1, 12)), draw(st.sampled_from(OVERLAPS_MS))
    body = rotation(f"t{number}", draw(st.sampled_from(sorted(SECRETS.values()))), overlap_ms)
    return Sent("job.secret_rotated", f"t{number}", written(body))


def rotated_sequences() -> st.SearchStrategy[list[Sent]]:
    """Sequences in which the secret changes often, and events are signed by any of them."""
    secrets = tuple(sorted(SECRETS.values()))
    # Few, so that the same event often comes again under another secret.
    alike = st.builds(
        lambda seq, detail, secret: Sent("job.event", "e", written(signed(seq, secret=secret, detail=detail))),
        st.integers(1, 4),
        st.sampled_from(("3/10", "3/10", "4/10")),
        st.sampled_from(secrets),
    )
    several = st.lists(alike, min_size=1, max_size=4) | events(6, secrets).map(lambda sent: [sent])
    cancelled = st.just([Sent("job.cancelled", "c1", written(cancellation("c1")))])
    one = st.integers(0, 29).flatmap(
        lambda n: cancelled if n == 0 else rotations().map(lambda sent: [sent]) if n < 10 else several
    )
    begun = [Sent("job.registered", "r", written(REGISTRATIONS[0]))]
    parts = st.lists(one, min_size=6, max_size=20)
    return parts.map(lambda found: begun + [sent for part in found for sent in part]).flatmap(_with_repeats)


def _with_repeats(sent: list[Sent]) -> st.SearchStrategy[list[Sent]]:
    if not sent:
        return st.just(sent)
    again = st.lists(st.tuples(st.integers(0, len(sent)), st.sampled_from(sent)), max_size=4)

    def put_in(repeats: list[tuple[int, Sent]]) -> list[Sent]:
        result = list(sent)
        for place, record in repeats:
            result.insert(place, record)
        return result

    return again.map(put_in)


def seen(settled: Settled) -> Expected:
    """The fold's answer in the model's words."""
    rows = [change.row for change in settled.changes]
    assert len(rows) <= 1
    row = msgspec.structs.asdict(rows[0]) if rows and rows[0] else None
    return Expected(settled.verdict, settled.reason, settled.late, settled.status_after, row)


def assert_agree(sent: list[Sent], kept: int) -> list[Expected]:
    """Settle `sent` by both and compare after every record. Returns what was said."""
    model, entries, answers = JobModel(JOB_ID, SECRETS, kept), Entries(), []
    for offset, (record_type, ce_id, value, cut) in enumerate(sent):
        more = (("ce_bodysize", b"2000000"), ("ce_bodysha256", b"00")) if cut else ()
        record = make_record(value, record_type, ce_id=ce_id, offset=offset, more_headers=more)
        before = dict(entries.stored())
        settled = settle(record, entries, KEYRING, Entries())
        expected = model.settle(record_type, ce_id, SENDER, value, record.logged_at_us, cut)
        assert seen(settled) == expected, f"record {offset}: {value!r}"
        assert (dict(entries.stored()) == before) == (settled.verdict != "accepted")
        answers.append(expected)
    return answers


@given(sequences(highest_seq=9, longest=25))
@settings(max_examples=150, deadline=None)
@example([Sent("job.registered", "r", written(REGISTRATIONS[0])), Sent("job.cancelled", "c1", b"{}")])
def test_the_fold_says_of_every_record_what_the_model_says(sent: list[Sent]) -> None:
    assert_agree(sent, kept=256)


@given(rotated_sequences())
@settings(max_examples=150, deadline=None)
def test_the_fold_believes_the_secrets_that_the_model_believes(sent: list[Sent]) -> None:
    assert_agree(sent, kept=256)


@given(sequences(highest_seq=12, longest=40))
@settings(max_examples=100, deadline=None)
def test_the_fold_forgets_exactly_what_the_model_forgets(sent: list[Sent]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "DIGESTS_KEPT", 3)
        patch.setattr(memories, "DIGESTS_INSIDE", 2)
        patch.setattr(memories, "SEQS_IN_A_CHUNK", 2)
        assert_agree(sent, kept=3)


@pytest.mark.long
@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=12, deadline=None)
def test_the_memory_of_256_seqs_is_the_models_over_a_long_job_with_gaps(seed: int, ends: bool) -> None:
    dice = random.Random(seed)
    kinds, top = [], 0
    for _ in range(450):
        top += dice.choice((1, 1, 1, 1, 2))
        seq = top if dice.random() < 0.8 else max(1, top - int(dice.expovariate(1 / 200)))
        kinds.append((seq, dice.choice(("3/10", "3/10", "4/10"))))
    sent = [Sent("job.registered", "r", written(registration()))]
    sent += [Sent("job.event", "e", written(signed(seq, detail=detail))) for seq, detail in kinds]
    if ends:
        sent.append(Sent("job.event", "e", written(signed(top + 1, "completed"))))
        sent += [Sent("job.event", "e", written(signed(s, "progress"))) for s in (1, 2, top // 2, top, top + 2)]
    said = {(a.verdict, a.reason) for a in assert_agree(sent, kept=256)}
    assert ("accepted", None) in said
    assert ("duplicate", None) in said


@pytest.mark.parametrize(
    ("first_seqs", "probe", "expected"),
    [
        (range(1, 301), (7, "3/10"), ("duplicate", None)),
        (range(1, 301), (7, "other"), ("duplicate", None)),  # below the floor only the seq is known
        (range(1, 301), (45, "other"), ("rejected", "seq_conflict")),
        (range(1, 301), (45, "3/10"), ("duplicate", None)),
        ((1, *range(3, 259)), (2, "3/10"), ("rejected", "too_late")),
        ((1, *range(3, 258)), (2, "3/10"), ("accepted", None)),
        (range(10, 266), (5, "3/10"), ("rejected", "too_late")),
        (range(10, 265), (5, "3/10"), ("accepted", None)),
    ],
)
def test_what_is_older_than_the_newest_256_seqs_is_told_by_the_floor_alone(
    first_seqs: Any, probe: tuple[int, str], expected: tuple[str, str | None]
) -> None:
    seqs = [(seq, "3/10") for seq in first_seqs] + [probe, probe]
    sent = [Sent("job.registered", "r", written(registration()))]
    sent += [Sent("job.event", "e", written(signed(seq, detail=detail))) for seq, detail in seqs]
    *_, first, again = assert_agree(sent, kept=256)
    assert (first.verdict, first.reason) == expected
    if first.verdict == "accepted":
        assert again.verdict == "duplicate", "what was accepted is known when it comes again (CM-04)"
    else:
        assert again == first
