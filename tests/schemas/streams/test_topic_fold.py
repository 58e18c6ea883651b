"""Topics (DL-24): who is subscribed at which offset, and what is published, as the fold settles it."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.record_macs import FILE_BRIDGE, GATEWAY, MQTT_BRIDGE
from schemas.streams.control.record_macs import macs_stream
from schemas.streams.fold import authentication_fault, settle
from schemas.streams.topic import topic_fold
from schemas.streams.topic.topic_registry import (
    Publication,
    Subscription,
    SubscriptionRow,
    TopicDelivery,
    TopicMessageRow,
    TopicRow,
    Unsubscription,
)
from schemas.wire.record import partition_for, read_envelope
from tests.schemas.hub_records import TOPIC_KEY, of_topic, publication
from tests.schemas.job_records import KEYRING, START_US, document_record, said
from tests.schemas.stream_records import accepted_and_refolded, as_read, good_record, with_mac

pytestmark = pytest.mark.requirement("DL-24")

R = TypeVar("R")
WEEK_US = topic_fold.ID_KEPT_US
OPERATOR: Any = {"door": "http", "principal": "operator"}
ANN: Any = {"door": "http", "principal": "ann"}
REACTOR: Any = {"door": "reactor", "principal": "reactor"}


class Topic:
    """The stream `topic/news`: each record is logged a millisecond after the one before it."""

    def __init__(self) -> None:
        self.entries = Entries()
        self.offset = 0
        self.now_us = START_US

    def settle(self, made: Any) -> Settled:
        """Settle a record of a door."""
        self.offset, self.now_us = self.offset + 1, self.now_us + 1000
        read = as_read(made, self.offset, self.now_us)
        return settle(read, self.entries, KEYRING, Entries())

    def subscribe(self, name: str, request_id: str = "") -> Settled:
        """Subscribe a name, by a request of its own unless it is given."""
        body = Subscription(topic="news", subscriber=name, request_id=request_id or f"s-{name}-{self.offset}")
        return self.settle(body.record(**OPERATOR))

    def unsubscribe(self, name: str, request_id: str = "", since: int | None = None) -> Settled:
        """End the subscription of a name."""
        request = request_id or f"u-{name}-{self.offset}"
        body = Unsubscription(topic="news", subscriber=name, request_id=request, since=since)
        return self.settle(body.record(**OPERATOR))

    def publish(self, message_id: str = "p1", **changed: Any) -> Settled:
        """Publish a message."""
        body = Publication.model_validate(publication(message_id, **changed))
        return self.settle(body.record(**ANN))

    def deliver(self, message_id: str = "p1") -> Settled:
        """Report that a message is delivered."""
        return self.settle(
            TopicDelivery(topic="news", message_id=message_id).record(ce_id=f"d-{message_id}", **REACTOR)
        )


def topic_of(*names: str) -> Topic:
    """A topic with these subscribers."""
    topic = Topic()
    for name in names:
        assert said(topic.subscribe(name)) == ("accepted", None)
    return topic


def row_of(row_type: type[R], settled: Settled) -> R:
    """The one changed row of a type."""
    (row,) = [change.row for change in settled.changes if isinstance(change.row, row_type)]
    return row


def recipients(settled: Settled) -> list[str] | None:
    """The recipients of a message that was published."""
    assert said(settled) == ("accepted", None)
    return row_of(TopicMessageRow, settled).recipients


def test_a_message_goes_to_those_who_are_subscribed_at_its_offset() -> None:
    topic = topic_of("bo", "ann")
    assert recipients(topic.publish("p1")) == ["ann", "bo"]
    topic.unsubscribe("ann")
    assert recipients(topic.publish("p2")) == ["bo"]
    topic.subscribe("cy")
    topic.subscribe("ann")
    assert recipients(topic.publish("p3")) == ["ann", "bo", "cy"]
    # A name that comes between a publication and its delivery gets nothing of it.
    topic.subscribe("dee")
    assert row_of(TopicMessageRow, topic.deliver("p3")).recipient_count == 3


def test_the_rows_tell_of_subscription_and_its_end() -> None:
    topic = Topic()
    first = topic.subscribe("bo")
    began = topic.now_us
    assert row_of(SubscriptionRow, first) == SubscriptionRow(
        "news", "bo", "subscribed", began, "http/operator", None, None
    )
    assert row_of(TopicRow, first) == TopicRow("news", 1, "http/operator", began, 0, 0, None, None)
    ended = topic.unsubscribe("bo")
    found = row_of(SubscriptionRow, ended)
    assert found == SubscriptionRow(
        "news", "bo", "unsubscribed", began, "http/operator", topic.now_us, "http/operator"
    )
    assert (found.is_live, row_of(TopicRow, ended).subscribers) == (False, 0)


def test_a_message_is_publishing_until_it_is_reported_as_delivered() -> None:
    topic = topic_of("bo")
    published = topic.publish()
    row = row_of(TopicMessageRow, published)
    assert (published.status_after, row.status, row.is_live) == ("publishing", "publishing", True)
    assert (row.published_at, row.published_offset, row.recipient_count) == (topic.now_us, topic.offset, 1)
    assert row_of(TopicRow, published).undelivered == 1
    delivered = topic.deliver()
    found = row_of(TopicMessageRow, delivered)
    assert (delivered.status_after, found.status, found.is_live) == ("delivered", "delivered", False)
    assert (found.delivered_at, found.recipients, found.recipient_count) == (topic.now_us, None, 1)
    assert (found.sender, found.kind, found.published_offset) == ("ann", "note", row.published_offset)
    topic_row = row_of(TopicRow, delivered)
    assert (topic_row.undelivered, topic_row.publications, topic_row.last_message_id) == (0, 1, "p1")
    assert topic_row.last_published_at == row.published_at
    again = topic.deliver()
    assert (said(again), again.status_after) == (("duplicate", None), "delivered")


@pytest.mark.parametrize("record_type", ["topic.published", "topic.unsubscribed", "topic.delivered"])
def test_a_topic_exists_from_its_first_subscription_on(record_type: str) -> None:
    unknown = settle(good_record(record_type), Entries(), KEYRING, Entries())
    assert said(unknown) == ("rejected", "unknown_stream")


def test_a_topic_that_all_have_left_still_exists() -> None:
    topic = topic_of("bo")
    topic.unsubscribe("bo")
    published = topic.publish()
    assert said(published) == ("accepted", None)
    row = row_of(TopicMessageRow, published)
    assert (row.status, row.recipient_count, row.delivered_at) == ("delivered", 0, topic.now_us)
    assert said(topic.publish()) == ("duplicate", None)


def test_the_same_message_again_is_a_duplicate_and_another_of_its_id_a_conflict() -> None:
    topic = topic_of("bo")
    topic.publish()
    for status in ("publishing", "delivered"):
        again, other = topic.publish(), topic.publish(body='{"n":2}')
        assert (said(again), again.status_after) == (("duplicate", None), status)
        assert (said(other), other.status_after) == (("rejected", "seq_conflict"), status)
        topic.subscribe(f"after-{status}")
        topic.deliver()


def test_an_id_is_known_for_a_week_and_while_its_message_is_publishing() -> None:
    topic = topic_of("bo")
    topic.publish("p1")
    topic.publish("p2")
    topic.deliver("p2")
    first = topic.now_us - 1000
    topic.now_us = first + WEEK_US - 1000
    assert said(topic.publish("p2", body="2")) == ("rejected", "seq_conflict")
    topic.now_us = first + WEEK_US
    assert said(topic.publish("p1", body="2")) == ("rejected", "seq_conflict")
    assert recipients(topic.publish("p2", body="2")) == ["bo"]
    assert row_of(TopicMessageRow, topic.deliver("p2")).published_at == topic.now_us - 1000


def test_an_entry_of_ids_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_fold, "IDS_TOGETHER", 2)
    monkeypatch.setattr(topic_fold, "_ID_DIGITS", 0)
    topic = topic_of("bo")
    for message_id in ("p1", "p2", "p3"):
        topic.publish(message_id)
        topic.deliver(message_id)
    assert said(topic.publish("p2")) == said(topic.publish("p3")) == ("duplicate", None)
    assert said(topic.deliver("p9")) == ("rejected", "unknown_stream")
    assert said(topic.publish("p1")) == ("accepted", None)


def test_a_delivery_of_an_unknown_message_is_refused() -> None:
    assert said(topic_of("bo").deliver("p9")) == ("rejected", "unknown_stream")


def test_a_repeated_request_has_its_effect_once() -> None:
    topic = topic_of("ann")
    assert said(topic.subscribe("bo", "r1")) == ("accepted", None)
    assert said(topic.subscribe("bo", "r1")) == ("duplicate", None)
    assert said(topic.subscribe("bo", "r2")) == ("duplicate", None)
    assert said(topic.subscribe("cy", "r1")) == ("rejected", "seq_conflict")
    assert said(topic.unsubscribe("bo", "r3")) == ("accepted", None)
    # The late repetition of a request must not subscribe a name that has left meanwhile.
    assert said(topic.subscribe("bo", "r1")) == ("duplicate", None)
    assert said(topic.unsubscribe("bo", "r4")) == ("duplicate", None)
    assert recipients(topic.publish()) == ["ann"]


def test_an_end_that_names_a_beginning_leaves_a_later_subscription() -> None:
    topic = topic_of("bo")
    began = topic.now_us
    topic.unsubscribe("bo")
    topic.subscribe("bo")
    late = topic.unsubscribe("bo", since=began)
    assert (said(late), late.status_after) == (("duplicate", None), "subscribed")
    assert said(topic.unsubscribe("bo", since=topic.now_us - 1000)) == ("accepted", None)


def test_a_topic_has_a_largest_number_of_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_fold, "SUBSCRIBERS_MOST", 2)
    topic = topic_of("ann", "bo")
    refused = topic.subscribe("cy", "r1")
    assert said(refused) == ("rejected", "illegal_transition")
    assert "2 subscribers" in str(refused.why)
    assert said(topic.subscribe("bo")) == ("duplicate", None)
    topic.unsubscribe("ann")
    assert said(topic.subscribe("cy", "r1")) == ("accepted", None)


def test_a_topic_takes_no_message_while_too_many_are_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_fold, "UNDELIVERED_MOST", 4)
    topic = topic_of("ann", "bo")
    assert said(topic.publish("p1")) == said(topic.publish("p2")) == ("accepted", None)
    assert said(topic.publish("p3")) == ("rejected", "illegal_transition")
    topic.deliver("p1")
    assert said(topic.publish("p3")) == ("accepted", None)


@pytest.mark.long
@pytest.mark.parametrize("count", [10, 2000])
def test_a_subscription_writes_as_much_with_many_subscribers_as_with_few(count: int) -> None:
    topic = topic_of(*(f"agent-{number}" for number in range(count)))
    topic.entries.take_writes()
    topic.subscribe("one-more")
    writes = topic.entries.take_writes()
    assert set(writes) - {key for key in writes if key.startswith("requests/")} == {"topic", "s/one-more"}
    assert sum(len(value or b"") for value in writes.values()) < 3000


@pytest.mark.parametrize(
    ("record_type", "body"),
    [
        ("topic.subscribed", of_topic(subscriber="a b", request_id="r")),
        ("topic.subscribed", of_topic(subscriber="bo")),
        ("topic.subscribed", of_topic(subscriber="bo", request_id="r", since=1)),
        ("topic.unsubscribed", of_topic(subscriber="bo", request_id="r", since=-1)),
        ("topic.published", publication(to="bo")),
        ("topic.published", publication(kind="")),
        ("topic.published", publication(expires_in_ms=5, deliver_after_ms=5)),
        ("topic.published", publication(topic="sports")),
        ("topic.delivered", of_topic()),
        ("topic.lost", of_topic()),
    ],
)
def test_a_body_that_its_model_refuses_is_malformed(record_type: str, body: dict[str, Any]) -> None:
    record = document_record(body, record_type, key=TOPIC_KEY)
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "malformed")


def test_the_records_of_a_topic_are_refolded_from_the_ledger() -> None:
    made = (
        Subscription(topic="news", subscriber="bo", request_id="r1").record(**OPERATOR),
        Publication.model_validate(publication()).record(**ANN),
        TopicDelivery(topic="news", message_id="p1").record(ce_id="d1", **REACTOR),
        Unsubscription(topic="news", subscriber="bo", request_id="r2").record(**OPERATOR),
    )
    rows, _ = accepted_and_refolded(as_read(one, offset) for offset, one in enumerate(made))
    assert [row.status_after for row in rows] == ["subscribed", "publishing", "delivered", "unsubscribed"]


@pytest.mark.requirement("ST-04")
@pytest.mark.parametrize("signer", [GATEWAY, MQTT_BRIDGE, FILE_BRIDGE])
def test_only_the_key_of_the_gateways_counts_for_a_topic(signer: str) -> None:
    macs = Entries()
    rules = good_record("control.macs_required")
    assert settle(rules, macs, KEYRING, macs).verdict == "accepted", macs_stream(1)
    record = with_mac(good_record("topic.subscribed"), signer)
    fault = authentication_fault(record, read_envelope(record), False, macs, KEYRING)
    assert (fault is None) == (signer == GATEWAY), partition_for(TOPIC_KEY, 4)
