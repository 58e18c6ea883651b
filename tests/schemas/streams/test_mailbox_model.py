"""The fold of a mailbox and the model of it agree on every sequence of records (HH-06)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold import memories
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.fold import settle
from schemas.streams.mailboxes.mailbox_bodies import (
    LIMIT_MOST,
    HandledMessage,
    MailboxClaim,
    MailboxClearing,
    MailboxClosing,
    MailboxLease,
    MailboxLimits,
    MailboxOpening,
    MessageAck,
    MessageDue,
    MessageExpiry,
    MessageExtension,
    MessageNack,
    MessageReading,
    MessageReclaim,
    MessagesHandled,
)
from schemas.streams.mailboxes.message import Message, MessageRow
from schemas.wire.record import OutgoingRecord
from tests.schemas.job_records import KEYRING, START_US
from tests.schemas.stream_records import as_read
from tests.schemas.streams.mailbox_model import (
    CONTENTS,
    LEADS_TO,
    OPEN,
    ORDER,
    WEEK_US,
    MailboxModel,
    Said,
    bytes_of,
    contents,
)

pytestmark = [pytest.mark.long, pytest.mark.requirement("HH-06")]

IDS = ("m1", "m2", "m3", "m4", "m5")
# Several doors lease at once. `made_of` takes the door of a lease for its end, if that is to be right.
CONSUMERS = (("xml", "bo"),) * 3 + (("http", "bo"),) * 2 + (("mcp", "bo"), ("xml", "cy"))
SENDERS = st.sampled_from(CONSUMERS)
# To the very microsecond at which a lease ends, a message expires or an id is forgotten, and beyond.
SHORT_US = (0, 1, 1000, 999_999, 29_000_000, 30_000_000)
LONG_US = (3_600_000_000, WEEK_US - 1, WEEK_US, WEEK_US + 1)
STEPS_US = st.sampled_from(SHORT_US[:3] * 8 + SHORT_US * 2 + LONG_US)
LEASES_MS = st.sampled_from((1, 1000, 30_000, 30_000, 86_400_000))
KINDS = ("posted",) * 6 + ("leased",) * 6 + ("nacked", "reclaimed") * 4 + ("acked",) * 3
KINDS += ("claimed", "read", "expired") * 2 + ("cleared", "named", "unread") + ("again", "extended") * 4
KINDS += ("closed",) + ("opened",) * 5 + ("handled",) + ("due",) * 3 + ("limited",)


class Wish(NamedTuple):
    """The next record to send, and its delay after the record before it.

    `is_right`: about a message that it is possible for, by its lease and holder; `about` says which.
    """

    step_us: int
    kind: str
    message_id: str
    about: int
    is_right: bool
    sender: tuple[str, str]
    request: str
    content: int
    limit: int
    lease_ms: int


ANSWER = {"message_id": "a1", "from": "bo", "to": "ann", "kind": "say", "body": "!"}


def posting(message_id: str, content: dict[str, Any], sender: tuple[str, str]) -> OutgoingRecord:
    """The record that posts a message."""
    body = {"message_id": message_id, "from": "ann", "to": "bo", "kind": "ask", "body": "?", **content}
    return Message.model_validate(body).record(door=sender[0], principal=sender[1])


WISHES = st.builds(
    Wish,
    STEPS_US,
    st.sampled_from(KINDS),
    st.sampled_from(IDS),
    st.integers(0, 9),
    st.integers(0, 5).map(bool),
    SENDERS,
    st.integers(1, 60).map("q{}".format),
    st.integers(0, 2 * CONTENTS - 1).map(lambda n: n if n < CONTENTS else n % 4),
    st.sampled_from((1, 1, 2, 100)),
    LEASES_MS,
)


def lease_conditions(wish: Wish) -> dict[str, Any]:
    """Return the conditions of a lease besides its size and duration, often none."""
    conditions: tuple[dict[str, Any], ...] = (
        {},
        {"held_most": 1 + wish.about % 3},
        {"per_minute": 1 + wish.about % 3},
        {"message_ids": list(IDS[wish.about % 5 :])},
        {"from_closed": True},
        {"held_most": 2, "per_minute": 2, "message_ids": list(IDS), "from_closed": True},
        {"attempts_most": 1 + wish.about % 5},
    )
    return conditions[wish.content % len(conditions)]


def own_limits(wish: Wish) -> dict[str, Any]:
    """Return limits of the mailbox's own, often none."""
    none = {"pending_most": None, "bytes_most": None}
    return none | {0: {"pending_most": 3 + wish.about}, 1: {"bytes_most": 3 + wish.about}}.get(
        wish.about % 6, {}
    )


def made_of(wish: Wish, model: MailboxModel, past: list[OutgoingRecord], now: int) -> OutgoingRecord:
    """The record that a door makes of a wish, knowing what the model knows."""
    at, by = {"to": "bo"}, {"door": wish.sender[0], "principal": wish.sender[1]}
    if wish.kind == "again" and past:
        made = past[-1 - wish.about % len(past)]
        body, origin = orjson.loads(made.value), {"door": made.door, "principal": made.principal}
        if made.type == "message.handled" and wish.content % 2:
            answers = [Message.model_validate(ANSWER)]
            handled = [HandledMessage(**{**one, "answers": answers}) for one in body["messages"]]
            return MessagesHandled(**at, messages=list(handled)).record(**origin)
        if made.type == "message.nacked" and wish.content % 2:
            named = {name: body[name] for name in ("message_id", "request_id")}
            return MessageNack(**at, **named, reason="for another reason").record(**origin)
        return made
    if wish.kind in ("posted", "again"):
        return posting(wish.message_id, contents(now)[wish.content], wish.sender)
    ids = list(IDS[wish.about % 5 :])
    named = {**at, "request_id": wish.request, "message_ids": ids, "limit": LIMIT_MOST}
    makers: dict[str, Callable[[], OutgoingRecord]] = {
        "claimed": lambda: MailboxClaim(**at, request_id=wish.request, limit=wish.limit).record(**by),
        "named": lambda: MailboxClaim(**named).record(**by),
        "unread": lambda: MailboxClaim(**named, if_unread=True).record(**by),
        "leased": lambda: MailboxLease(
            **at, request_id=wish.request, limit=wish.limit, lease_ms=wish.lease_ms, **lease_conditions(wish)
        ).record(**by),
        "closed": lambda: MailboxClosing(**at, request_id=wish.request).record(ce_id=f"c{wish.request}", **by),
        "opened": lambda: MailboxOpening(**at, request_id=wish.request).record(ce_id=f"o{wish.request}", **by),
        "cleared": lambda: MailboxClearing(**at, request_id=wish.request).record(**by),
        "limited": lambda: MailboxLimits(**at, request_id=wish.request, **own_limits(wish)).record(**by),
    }
    if wish.kind in makers:
        return makers[wish.kind]()
    message_id, request = wish.message_id, wish.request
    asked = {"expired": "expires_at", "due": "deliver_at"}.get(wish.kind, "lease_until")
    known = [*model.delayed(), *model.pending()]
    special = [m for m in known if m[asked] is not None]
    fitting = special or known or model.messages
    if fitting and wish.is_right:
        message = fitting[wish.about % len(fitting)]
        message_id, request = message["message_id"], message["request_id"] or request
        if message["handed_to"] is not None:
            door, _, principal = message["handed_to"].partition("/")
            by = {"door": door, "principal": principal}
    held = [m for m in model.pending() if m["handed_to"] == f"{by['door']}/{by['principal']}"]
    others = {m["message_id"]: m["request_id"] or "q0" for m in held if wish.limit > 1}
    several = {**others, message_id: request}
    word = {**at, "message_id": message_id}
    held_word = {**word, "request_id": request}
    makers = {
        "handled": lambda: MessagesHandled(
            **at, messages=[HandledMessage(message_id=m, request_id=r) for m, r in several.items()]
        ).record(**by),
        "acked": lambda: MessageAck(**held_word).record(**by),
        "nacked": lambda: MessageNack(
            **held_word,
            reason=("", "no disk")[wish.content % 2],
            is_no_attempt=True if wish.content == 3 else None,
        ).record(**by),
        "reclaimed": lambda: MessageReclaim(**held_word).record(**by),
        "extended": lambda: MessageExtension(**held_word, lease_ms=wish.lease_ms).record(
            ce_id=f"e{wish.request}", **by
        ),
        "read": lambda: MessageReading(**word).record(**by),
        "expired": lambda: MessageExpiry(**word).record(**by),
        "due": lambda: MessageDue(**word).record(ce_id=f"d{wish.request}", **by),
    }
    return makers[wish.kind]()


class WatchedEntries(Entries):
    """Entries that tell when the fold iterates over more than it may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_posting = False

    def with_prefix(self, prefix: str) -> Iterator[str]:
        assert prefix in ("m/", "d/"), "only messages without a final status are iterated over"
        assert not self.is_posting, "a posting looks at its own id and at nothing else"
        return super().with_prefix(prefix)


def seen(settled: Settled) -> Said:
    """The fold's answer in the model's words."""
    rows = []
    for change in settled.changes:
        assert change.row is not None
        row = msgspec.structs.asdict(change.row)
        assert change.key == "/".join(("default", "bo", *([row["message_id"]] if "message_id" in row else [])))
        if change.view == "mailbox_limits":
            assert (row["realm"], row["recipient"]) == ("default", "bo")
        elif change.view == "mailbox":
            assert isinstance(change.row, MessageRow)
            rows.append(row)
        else:
            assert change.view == "message_bodies" and settled.status_after in ("unread", "delayed")
    return Said(settled.verdict, settled.reason, settled.status_after, tuple(rows))


_OF_MESSAGES = re.compile("m/|d/|id/|requests/(message/)?[0-9a-f]{2}$").match


def assert_holds_the_pending_alone(entries: Entries, model: MailboxModel, now: int) -> None:
    """The stream state contains only the model's pending messages and entries of bounded size."""
    stored = entries.stored()
    wanted = [
        f"m/{ORDER.index(m['priority'])}/{m['posted_at']:016x}/{m['message_id']}" for m in model.pending()
    ]
    assert list(entries.with_prefix("m/")) == wanted
    assert list(entries.with_prefix("d/")) == [f"d/{m['message_id']}" for m in model.delayed()]
    others = {key for key in stored if not _OF_MESSAGES(key)}
    assert others <= {"last", "requests", "requests/message", "leases", "handed", "closed", "size", "limits"}
    if "size" in stored:
        open_now = [(m, b) for m, b in zip(model.messages, model.bodies, strict=True) if m["status"] in OPEN]
        size = [len(open_now), sum(bytes_of(body) for _, body in open_now)]
        assert msgspec.msgpack.decode(stored["size"])[1:] == size
    known = {m["message_id"] for m in model.messages}
    for key in stored:
        if key.startswith("id/"):
            _, ids, is_split = msgspec.msgpack.decode(stored[key])
            assert (len(key), is_split) == (6, False)
            assert set(ids) <= known


# Now and then a record is logged by a clock that is so far ahead.
AHEAD_US = {3: 3_500_000_000, 5: 36_000_000_000, 7: 370 * 86_400_000_000}


def assert_agree(
    wishes: list[Wish], kept: int, is_clock_wrong: bool = False
) -> set[tuple[str, str | None, str | None]]:
    """Settle what is wished by both and compare after every record; returns what was said of which type."""
    model, entries, right_now = MailboxModel("default", "bo", kept), WatchedEntries(), START_US
    past: list[OutgoingRecord] = []
    ended: set[tuple[str, int]] = set()
    reached = set()
    for offset, wish in enumerate(wishes):
        right_now = right_now + wish.step_us
        now = right_now + (AHEAD_US.get(wish.about, 0) if is_clock_wrong else 0)
        made = made_of(wish, model, past, now)
        if is_clock_wrong and (b"held_most" in made.value or b"per_minute" in made.value):
            continue  # the counts of leases forget what the wrong clock has seen expire
        past.append(made)
        record = msgspec.structs.replace(as_read(made, offset), logged_at_us=now)
        before = dict(entries.stored())
        entries.is_posting = made.type == "message.posted"
        settled = settle(record, entries, KEYRING, Entries())
        entries.is_posting = False
        kind, body = made.type.partition(".")[2], orjson.loads(made.value)
        said, wanted = seen(settled), model.settle(kind, made.ce_id, f"{made.door}/{made.principal}", body, now)
        assert said == wanted, (offset, made.type)
        reached |= {(kind, said.reason or said.verdict, row["status"]) for row in said.rows}
        reached |= {("reason", row["last_reason"], row["status"]) for row in said.rows}
        holders = {row["handed_to"] for row in model.pending() if row["status"] == "leased"}
        reached.add(("holders", None, str(len(holders))))
        reached.add((kind, said.reason or said.verdict, said.status))
        if settled.verdict != "accepted":
            assert (dict(entries.stored()), settled.changes) == (before, ())
        for row in said.rows:
            incarnation = (row["message_id"], row["posted_at"])
            assert incarnation not in ended, "what is final stays so, and is handed out no more"
            if row["status"] not in OPEN:
                ended.add(incarnation)
        open_now = len(model.pending()) + len(model.delayed())
        assert len(ended) + open_now == len(model.messages), "nothing without an end is lost"
        assert_holds_the_pending_alone(entries, model, now)
    return reached


FIRST = Wish(0, "posted", "m1", 0, True, ("http", "ann"), "q0", 0, 1, 1)
SEQUENCES = st.builds(
    lambda first, rest: (
        [FIRST._replace(message_id=f"m{n}", content=content) for n, content in enumerate(first, 1)] + rest
    ),
    st.lists(st.integers(0, CONTENTS - 1), max_size=4),
    st.lists(WISHES, min_size=20, max_size=60) | st.lists(WISHES, max_size=8),
)


@given(SEQUENCES)
@settings(max_examples=300, deadline=None)
def test_the_fold_says_of_every_record_of_a_mailbox_what_the_model_says(wishes: list[Wish]) -> None:
    assert_agree(wishes, kept=256)


@pytest.mark.requirement("ST-86")
@given(SEQUENCES)
@settings(max_examples=150, deadline=None)
def test_a_mailbox_heals_from_records_of_a_wrong_clock_as_the_model_says(wishes: list[Wish]) -> None:
    assert_agree(wishes, kept=256, is_clock_wrong=True)


@given(SEQUENCES)
@settings(max_examples=150, deadline=None)
def test_the_fold_forgets_the_requests_that_the_model_forgets(wishes: list[Wish]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "REQUESTS_KEPT", 2)
        patch.setattr(memories, "REQUESTS_INSIDE", 2)
        assert_agree(wishes, kept=2)


def a_walk(draw: random.Random, length: int) -> list[Wish]:
    """Wishes by chance, longer than hypothesis makes them."""
    steps = [0] * 20 + [*SHORT_US] * 3 + [3_600_000_000]
    return [
        Wish(
            draw.choice(steps) if draw.random() < 0.995 else draw.choice(LONG_US),
            draw.choice(KINDS + ("again",) * 8 + ("expired",) * 3),
            f"m{number // 4 + draw.randrange(5)}",
            draw.randrange(12),
            draw.random() < 0.8,
            draw.choice(CONSUMERS),
            f"q{number + draw.randrange(5)}",
            draw.choice((0, 1, 2, draw.randrange(CONTENTS))),
            draw.choice((1, 1, 2, 100)),
            draw.choice((1, 1000, 30_000, 86_400_000)),
        )
        for number in range(length)
    ]


# Type, verdict or reason, and the status that a row or the record has.
REACHED = {
    *(
        ("posted", said, status)
        for said in ("duplicate", "seq_conflict")
        for status in ("delayed", "unread", "leased", None)
    ),
    ("posted", "accepted", "delayed"),
    ("posted", "mailbox_full", None),
    *(("limited", said, None) for said in ("accepted", "duplicate")),
    ("due", "accepted", "unread"),
    *(("due", "illegal_transition", status) for status in ("delayed", "unread", "leased")),
    *((kind, "illegal_transition", "delayed") for kind in ("acked", "read", "nacked", "expired")),
    *(("claimed", "accepted", status) for status in ("claimed", "expired", "dead", None)),
    *(("leased", "accepted", status) for status in ("leased", "expired", "dead", None)),
    ("leased", "illegal_transition", None),
    *((kind, said, None) for kind in ("claimed", "leased") for said in ("duplicate", "seq_conflict")),
    *((kind, said, None) for kind in ("cleared", "closed", "opened") for said in ("accepted", "duplicate")),
    ("posted", "illegal_transition", None),
    *((kind, "accepted", status) for kind in ("nacked", "reclaimed") for status in ("unread", "dead")),
    *((kind, "duplicate", status) for kind in ("nacked", "reclaimed") for status in ("unread", "leased", None)),
    *(("nacked", "seq_conflict", status) for status in ("unread", None)),
    *(("extended", said, "leased") for said in ("accepted", "duplicate", "seq_conflict")),
    ("extended", "illegal_transition", "unread"),
    *((kind, said, word) for kind, word in LEADS_TO.items() for said in ("accepted", "duplicate")),
    *(
        (kind, said, None)
        for kind in (*LEADS_TO, "nacked", "reclaimed", "extended", "due")
        for said in ("unknown_stream", "after_terminal")
    ),
    *(("reason", reason, "dead") for reason in ("no disk", "the lease ran out", None)),
    *(("holders", None, number) for number in "0123"),
    *(("handled", said, "claimed") for said in ("accepted", "duplicate", "seq_conflict")),
    *(("handled", "illegal_transition", status) for status in ("leased", "unread", None)),
    *((kind, "illegal_transition", "leased") for kind in (*LEADS_TO, "nacked", "reclaimed", "extended", "due")),
}


def test_long_walks_agree_too_and_come_through_every_state() -> None:
    reached = set()
    for seed in range(60):
        reached |= assert_agree(a_walk(random.Random(seed), 1000), kept=256)
        if seed >= 10 and reached >= REACHED:
            break
    assert REACHED - reached == set()
