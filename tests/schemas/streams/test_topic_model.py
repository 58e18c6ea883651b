"""The fold of a topic and the model of it agree on every sequence of records (DL-24)."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold.entries import Entries
from schemas.streams.fold import settle
from tests.schemas.job_records import KEYRING, START_US, make_record, written
from tests.schemas.streams.topic_model import WEEK_US, Said, TopicModel

pytestmark = pytest.mark.requirement("DL-24")

SENDERS = ("http/ann", "mcp/bo", "reactor/reactor")
# To the very microsecond at which an id is forgotten, and beyond.
STEPS_US = st.sampled_from((0, 0, 1, 1000, 1000, 60_000_000, WEEK_US - 1, WEEK_US, WEEK_US + 1))
KINDS = ("subscribed",) * 4 + ("unsubscribed",) * 3 + ("published",) * 4 + ("delivered",) * 3


class Wish(NamedTuple):
    """The next record, and its delay after the record before it."""

    step_us: int
    kind: str
    who: int
    request: int
    content: int
    sender: str


WISHES = st.builds(
    Wish,
    STEPS_US,
    st.sampled_from(KINDS),
    st.integers(0, 4),
    st.integers(0, 30),
    st.integers(0, 5),
    st.sampled_from(SENDERS),
)


BLOB = {"expires_in_ms": 5, "blob": {"digest": "ab" * 32, "bytes": 2, "content_type": "image/png"}}


def body_of(wish: Wish, since: int) -> dict[str, Any]:
    """The body of a wish; `since` is when some subscription began."""
    about: dict[str, Any] = {"schema_version": 1, "topic": "news"}
    if wish.kind in ("subscribed", "unsubscribed"):
        about |= {"subscriber": f"agent-{wish.who}", "request_id": f"r{wish.request}"}
        if wish.kind == "unsubscribed" and wish.content < 3:
            about["since"] = (since, since + 1, 0)[wish.content]
        return about
    about["message_id"] = f"m{wish.who}"
    if wish.kind == "published":
        content = ({}, {}, {}, {"priority": "high"}, {"thread": "t"}, BLOB)[wish.content]
        about |= {"from": "ann", "kind": "note", "body": "☃", **content}
    return about


def check(wishes: list[Wish]) -> None:
    """Settle all, a runner storing the entries now and then, and compare each with the model."""
    model, entries, now = TopicModel("news"), Entries(), START_US
    for offset, wish in enumerate(wishes):
        now += wish.step_us
        begun = [at for _, begins, at, _ in model.changes if begins]
        body = body_of(wish, begun[-1] if begun else 0)
        identity = body.get("message_id") or f"{wish.kind} {wish.sender} {wish.request}"
        made = make_record(
            written(body),
            f"topic.{wish.kind}",
            key=b"topic/news",
            ce_id=identity,
            sender=wish.sender,
            offset=offset,
        )
        found = settle(msgspec.structs.replace(made, logged_at_us=now), entries, KEYRING, Entries())
        rows = tuple(msgspec.structs.asdict(change.row) for change in found.changes if change.row is not None)
        expected = model.settle(wish.kind, identity, wish.sender, body, offset, now)
        assert Said(found.verdict, found.reason, found.status_after, rows) == expected, (offset, wish)
        if offset % 7 == 0:
            entries = Entries(entries.stored())


@given(st.lists(WISHES, max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_fold_agrees_with_the_model(wishes: list[Wish]) -> None:
    check(wishes)


@pytest.mark.long
def test_the_fold_agrees_with_the_model_over_a_long_life() -> None:
    draw = random.Random(5)
    wishes = [
        Wish(
            draw.choice((0, 1, 1000, 60_000_000, 3_600_000_000)),
            draw.choice(KINDS),
            draw.randrange(40),
            draw.randrange(600),
            draw.randrange(6),
            draw.choice(SENDERS),
        )
        for _ in range(4000)
    ]
    check(wishes)
