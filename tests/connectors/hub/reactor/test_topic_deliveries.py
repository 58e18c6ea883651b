"""The copies of a message to a topic, and ends of subscriptions (DL-24), derived without Kafka."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from connectors.hub.reactor.derived_records import TopicsBySubscriber
from schemas.effects.topic_effects import Delivery, delivery_of
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.streams.agents.agent_registry import AgentJoined, AgentStopped
from schemas.streams.control.limits import LimitsSet
from schemas.streams.mailboxes.message import Message, MessageRow
from schemas.streams.principal.principals import (
    OPERATOR,
    PrincipalAddition,
    PrincipalRevocation,
    token_hash,
)
from schemas.streams.task.task_registry import TASK_COMPLETED
from schemas.streams.topic.topic_registry import (
    Publication,
    Subscription,
    SubscriptionRow,
    TopicMessageRow,
    TopicRow,
    Unsubscription,
)
from schemas.wire.record import OutgoingRecord, Record
from tests.connectors.hub.reactor.followed import follows
from tests.connectors.hub.reactor.test_derived_records_hub import Folded
from tests.schemas.hub_records import public_key, publication
from tests.schemas.job_records import said
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import decode

pytestmark = pytest.mark.requirement("DL-24")

BY: Any = {"door": "http", "principal": "operator"}


def subscription(name: str, request_id: str = "", topic: str = "news") -> OutgoingRecord:
    """The record that subscribes a name."""
    body = Subscription(topic=topic, subscriber=name, request_id=request_id or f"s-{topic}-{name}")
    return body.record(**BY)


def published(message_id: str = "p1", **changed: Any) -> OutgoingRecord:
    """The record of a message to the topic."""
    body = Publication.model_validate(publication(message_id, **changed))
    return body.record(door="http", principal="ann")


def log_of(*names: str) -> Folded:
    """A log with these subscribers."""
    log = Folded()
    for name in names:
        assert said(log.add(subscription(name))[0]) == ("accepted", None)
    return log


def delivery(log: Folded, record: Record) -> Delivery:
    """The delivery that must follow from a record."""
    found = delivery_of(record, log.get)
    assert found is not None
    return found


def test_each_recipient_gets_a_copy_with_the_content_and_an_id_of_its_own() -> None:
    log = log_of("bo", "cy")
    about = {"priority": "high", "thread": "t1", "in_reply_to": "m0", "from_task": "k1", "body": "☃"}
    _, record = log.add(published("p1", deliver_after_ms=5, **about))
    found = delivery(log, record)
    copies = list(found.copies())
    assert [copy.stream for copy in copies] == ["mailbox/default/bo", "mailbox/default/cy"]
    assert len({copy.ce_id for copy in copies}) == 2
    for copy, name in zip(copies, ("bo", "cy"), strict=True):
        body = decode(copy.value)[0]
        assert (body["to"], body["message_id"], body["from"]) == (name, found.copy_id(name), "ann")
        assert (body["topic"], body["broadcast_id"], body["from_verified"]) == ("news", "p1", True)
        assert {name: body[name] for name in about} == about
        # The same bytes as by the way of all other messages.
        message = Message.model_validate(body)
        assert copy == message.record(door="topic", principal="ann")
        settled, _ = log.add(copy)
        assert said(settled) == ("accepted", None)
    row = log.get(MessageRow, f"default/bo/{found.copy_id('bo')}")
    assert (row.topic, row.broadcast_id, row.status) == ("news", "p1", "delayed")
    assert (found.delivered().type, found.delivered().door) == ("topic.delivered", "reactor")


def test_a_message_of_no_topic_has_none() -> None:
    log = Folded()
    message = {"message_id": "m1", "from": "ann", "to": "bo", "kind": "ask", "body": "?"}
    log.add(Message.model_validate(message).record(**BY))
    assert log.get(MessageRow, "default/bo/m1").topic is None


def test_the_copies_are_the_same_whenever_they_are_derived() -> None:
    log = log_of("bo", "cy")
    _, record = log.add(published(expires_in_ms=60_000))
    first = list(delivery(log, record).copies())
    log.add(subscription("dee"))
    log.add(Unsubscription(topic="news", subscriber="bo", request_id="u").record(**BY))
    again = delivery(log, record)
    assert list(again.copies()) == first
    assert again.recipients == ["bo", "cy"]


def test_a_copy_expires_by_the_time_of_the_publication() -> None:
    log = log_of("bo")
    _, record = log.add(published(expires_in_ms=60_000))
    (copy,) = delivery(log, record).copies()
    body = decode(copy.value)[0]
    assert body["expires_at"] == iso_moment(record.logged_at_us + 60_000_000)
    assert "expires_in_ms" not in body


def test_only_the_accepted_publication_is_delivered_and_only_until_it_is_reported() -> None:
    log = log_of("bo")
    assert delivery_of(log.add(subscription("cy"))[1], log.get) is None
    _, record = log.add(published("p1"))
    for other in (published("p1"), published("p1", body="other"), published("p1", kind="more")):
        settled, refused = log.add(other)
        assert settled.verdict != "accepted"
        assert delivery_of(refused, log.get) is None
    found = delivery(log, record)
    assert said(log.add(found.delivered())[0]) == ("accepted", None)
    assert delivery_of(record, log.get) is None
    assert said(log.add(found.delivered())[0]) == ("duplicate", None)


def test_nothing_follows_from_a_publication_that_is_nonsense_or_for_nobody() -> None:
    log = log_of("bo")
    log.add(Unsubscription(topic="news", subscriber="bo", request_id="u").record(**BY))
    assert delivery_of(log.add(published("p1"))[1], log.get) is None
    log.add(subscription("cy"))
    _, record = log.add(published("p2"))
    assert delivery(log, record).recipients == ["cy"]
    for value in (None, b"", b"[1]", b'{"topic":"news"}'):
        assert delivery_of(msgspec.structs.replace(record, value=value), log.get) is None
    assert delivery_of(msgspec.structs.replace(record, key=None), log.get) is None
    assert delivery_of(msgspec.structs.replace(record, key=b"task/news"), log.get) is None


def test_a_second_message_of_an_id_after_a_week_has_other_copies() -> None:
    log = log_of("bo")
    _, record = log.add(published("p1"))
    row = log.get(TopicMessageRow, "news/p1")
    first = delivery(log, record)
    later = msgspec.structs.replace(row, published_at=row.published_at + 8 * 24 * 3600 * 1_000_000)
    second = delivery_of(record, lambda row_type, key: later)
    assert second is not None
    assert first.copy_id("bo") != second.copy_id("bo")
    assert first.delivered().ce_id != second.delivered().ce_id


@pytest.mark.requirement("HH-07")
def test_what_is_published_completes_no_task() -> None:
    log = log_of("bo")
    _, record = log.add(published(from_task="t1", body=f'{{"event":"{TASK_COMPLETED}"}}'))
    (copy,) = delivery(log, record).copies()
    _, posted = log.add(copy)
    assert follows(posted, log.get) == []


def ends_after(record: Record, log: Folded, topics: TopicsBySubscriber) -> list[OutgoingRecord]:
    """Return the ends of subscriptions that follow from a record."""
    return follows(record, log.get, related=lambda _, subscriber: topics.topics_of(subscriber))


def topics_by(log: Folded, *topics: str) -> TopicsBySubscriber:
    """The index of the subscriptions of `bo` to these topics."""
    found = TopicsBySubscriber()
    found.load(log.get(SubscriptionRow, f"{topic}/bo") for topic in topics)
    return found


def joined(request_id: str = "j1") -> OutgoingRecord:
    """The record by which `bo` takes part."""
    body = AgentJoined(
        agent_name="bo", request_id=request_id, task="count", capabilities=[], public_key=public_key()
    )
    return body.record(**BY)


def end_all(log: Folded, ends: Iterable[OutgoingRecord]) -> list[tuple[str, str]]:
    """Add the ends of subscriptions; topic and verdict of each."""
    return [(one.stream.partition("/")[2], log.add(one)[0].verdict) for one in ends]


STOPPED = AgentStopped(agent_name="bo", request_id="e1").record(**BY)


def test_a_stopped_agent_is_subscribed_to_nothing_any_more() -> None:
    log = log_of("ann")
    log.add(joined())
    for topic in ("news", "sports"):
        log.add(subscription("bo", topic=topic))
    topics = topics_by(log, "news", "sports")
    assert ends_after(log.add(joined("again"))[1], log, topics) == []
    _, stop = log.add(STOPPED)
    ends = ends_after(stop, log, topics)
    assert ends == ends_after(stop, log, topics)
    assert end_all(log, ends) == [("news", "accepted"), ("sports", "accepted")]
    assert log.get(SubscriptionRow, "news/bo").unsubscribed_by == "reactor/reactor"
    assert log.get(TopicRow, "news").subscribers == 1
    assert ends_after(stop, log, topics) == []


def test_an_agent_that_joined_and_subscribed_again_stays_subscribed() -> None:
    log = Folded()
    log.add(joined())
    log.add(subscription("bo"))
    topics = topics_by(log, "news")
    _, stop = log.add(STOPPED)
    ends = ends_after(stop, log, topics)
    # Before the reactor's record comes into the log, the agent is back.
    log.add(Unsubscription(topic="news", subscriber="bo", request_id="u1").record(**BY))
    log.add(joined("j2"))
    log.add(subscription("bo", "s2"))
    assert end_all(log, ends) == [("news", "duplicate")]
    assert log.get(SubscriptionRow, "news/bo").status == "subscribed"
    assert ends_after(stop, log, topics) == []


def test_a_revoked_principal_is_subscribed_to_nothing_and_one_with_another_mailbox_stays() -> None:
    log = Folded()
    log.add(
        PrincipalAddition(principal="bo", role="worker", token_sha256=token_hash("token")).record(
            door="http", principal=OPERATOR
        )
    )
    log.add(subscription("bo"))
    topics = topics_by(log, "news")
    log.add(joined())
    _, revoked = log.add(PrincipalRevocation(principal="bo").record(door="http", principal=OPERATOR))
    assert ends_after(revoked, log, topics) == [], "it takes part as an agent"
    _, stop = log.add(STOPPED)
    ends = ends_after(stop, log, topics)
    assert end_all(log, ends) == [("news", "accepted")]


def test_the_topics_of_a_subscriber_are_forgotten_with_its_subscriptions() -> None:
    topics = TopicsBySubscriber()
    row = SubscriptionRow("news", "bo", "subscribed", 1, "http/bo", None, None)
    gone = msgspec.structs.replace(row, topic="old")
    topics.changed(changed_row(msgspec.structs.replace(gone, status="unsubscribed")))
    topics.load([row, gone])
    topics.changed(changed_row(msgspec.structs.replace(row, topic="sports")))
    topics.changed(changed_row(TopicRow("news", 1, "http/bo", 1, 0, 0, None, None)))
    assert (sorted(topics.topics_of("bo")), topics.count("bo")) == (["news", "sports"], 2)
    topics.changed(changed_row(msgspec.structs.replace(row, status="unsubscribed")))
    assert topics.topics_of("bo") == ["sports"]
    assert (topics.topics_of("cy"), topics.count("cy")) == ([], 0)


def changed_row(row: Row) -> AppliedChange:
    """The change of a row, as a live view reports it."""
    return AppliedChange(row.VIEW, row.key, 1, row)


@pytest.mark.requirement("LM-01")
def test_a_full_mailbox_gets_no_copy_and_the_others_do() -> None:
    log = log_of("bo", "cy")
    limits = LimitsSet(scope="name", name="bo", request_id="l1", pending_most=0)
    assert said(log.add(limits.record(**BY))[0]) == ("accepted", None)
    _, record = log.add(published())
    found = delivery(log, record)
    settled = [said(log.add(copy)[0]) for copy in found.copies()]
    assert settled == [("rejected", "mailbox_full"), ("accepted", None)]
    assert said(log.add(found.delivered())[0]) == ("accepted", None)
