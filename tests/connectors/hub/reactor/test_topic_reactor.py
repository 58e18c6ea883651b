"""Messages to topics (DL-24) on a real Kafka: no copy is lost or double, wherever the reactor is killed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

import connectors.hub.reactor.reactor as reactor_module
from connectors.hub.live.live_view import LiveView
from schemas.effects.topic_effects import TOPIC_DOOR, Delivery
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.agents.agent_registry import AgentJoined, AgentStopped
from schemas.streams.mailboxes.message import MESSAGE_POSTED, MessageRow
from schemas.streams.topic.topic_registry import (
    Publication,
    Subscription,
    SubscriptionRow,
    TopicMessageRow,
    TopicRow,
    Unsubscription,
)
from schemas.tables.ledger import LEDGER
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.connectors.hub.live.test_live_view import opened
from tests.connectors.hub.reactor.dying_reactor import DyingReactor, reacting
from tests.jobs.topic_load import append_all
from tests.raw_records import read_to_end
from tests.schemas.hub_records import public_key

pytestmark = [pytest.mark.requirement("DL-24"), pytest.mark.kafka]

BY: Any = {"door": "http", "principal": "operator"}
# The recipients of each message: `cy` leaves after the first, and `dee` comes after the second.
EXPECTED = {"p1": {"ann", "bo", "cy"}, "p2": {"ann", "bo"}, "p3": {"ann", "bo", "dee"}, "p4": {"eve"}}
COPIES = {(name, message_id) for message_id, names in EXPECTED.items() for name in names}


def subscription(topic: str, name: str) -> OutgoingRecord:
    """The record that subscribes a name."""
    return Subscription(topic=topic, subscriber=name, request_id=f"s-{name}").record(**BY)


def published(topic: str, message_id: str, body: str = "{}") -> OutgoingRecord:
    """The record of a message to a topic."""
    fields = {"topic": topic, "message_id": message_id, "from": "ann", "kind": "note", "body": body}
    return Publication.model_validate(fields).record(**BY)


def life() -> Iterator[OutgoingRecord]:
    """Two topics, of which one changes its subscribers between messages; each message comes twice."""
    yield from (subscription("news", name) for name in ("ann", "bo", "cy"))
    yield from [published("news", "p1")] * 2
    yield Unsubscription(topic="news", subscriber="cy", request_id="u-cy").record(**BY)
    yield from [published("news", "p2")] * 2
    yield subscription("news", "dee")
    yield from [published("news", "p3")] * 2
    yield subscription("sports", "eve")
    yield published("sports", "p4")


def copies_in(view: LiveView) -> list[tuple[str, str]]:
    """Recipient and message of each copy in the mailboxes."""
    rows = view.all(MessageRow)
    assert {row.topic for row in rows} <= {"news", "sports"}
    return sorted((row.recipient, str(row.broadcast_id)) for row in rows)


def statuses(view: LiveView) -> dict[str, str]:
    """The status of each message to a topic."""
    return {row.message_id: row.status for row in view.all(TopicMessageRow)}


def assert_each_once(view: LiveView, timeout_s: float = 60) -> None:
    """Wait until all is delivered; each recipient has its copy once, and the log has nothing refused."""
    delivered = dict.fromkeys(EXPECTED, "delivered")
    wait_until(lambda: statuses(view) == delivered, timeout_s, "all messages are delivered")
    view.catch_up(10)
    assert copies_in(view) == sorted(COPIES)
    found, _ = view.feed.since(0, 100_000)
    verdicts = Counter(
        (one.stream.partition("/")[0], one.verdict)
        for one in found
        if one.type in (MESSAGE_POSTED, "topic.delivered")
    )
    assert verdicts["mailbox", "accepted"] == len(COPIES)
    assert verdicts["topic", "accepted"] == len(EXPECTED)
    assert {verdict for _, verdict in verdicts} <= {"accepted", "duplicate"}


def assert_reported_after_copies(settings: Settings) -> Counter[str]:
    """Check that a message is reported as delivered only if the log has all copies; count the records."""
    copies, reported, counts = defaultdict(set), set(), Counter[str]()
    for record in read_to_end(settings.kafka):
        headers = {name: value.decode() for name, value in record.headers}
        body = record.value.decode()
        counts[headers["ce_type"]] += 1
        for message_id in EXPECTED:
            if f'"broadcast_id":"{message_id}"' in body:
                copies[message_id].add(record.key.decode().rpartition("/")[2])
            elif headers["ce_type"] == "topic.delivered" and f'"message_id":"{message_id}"' in body:
                reported.add(message_id)
    for message_id in reported:
        assert copies[message_id] == EXPECTED[message_id]
    return counts


@pytest.fixture
def settings(backbone_settings: Settings) -> Settings:
    """Settings with a consumer group of this test's own."""
    group = f"reactor-{backbone_settings.kafka.topic}"
    gateway = backbone_settings.gateway.model_copy(update={"reactor_group": group})
    return backbone_settings.model_copy(update={"gateway": gateway})


def test_each_subscriber_gets_each_message_once(settings: Settings, keyring: Keyring) -> None:
    with opened(settings, keyring) as view, reacting(settings, view):
        append_all(settings, life())
        assert_each_once(view)
        assert view.get(TopicRow, "news") is not None
        assert_reported_after_copies(settings)


# The nine copies, and then the four reports, each with a step before and after it.
DEATHS = [("seen", 1), ("acknowledged", 1), ("committed", 1)]
DEATHS += [(step, number) for step in ("before_append", "appended") for number in (1, 4, 9, 10, 13)]


@pytest.mark.requirement("CM-04")
def test_killed_at_any_step_no_copy_is_lost_or_double(
    settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    dying = {death: DyingReactor(settings, life(), *death, tmp_path) for death in DEATHS}
    for one in dying.values():
        one.wait()
    counts = {death: assert_reported_after_copies(one.settings) for death, one in dying.items()}
    assert counts["seen", 1][MESSAGE_POSTED] == 0
    assert counts["before_append", 10]["topic.delivered"] == 0
    # A first poll may have none of the publications.
    assert sum(one[MESSAGE_POSTED] for one in counts.values()) > 0
    with ExitStack() as stack:
        views = {death: stack.enter_context(opened(one.settings, keyring)) for death, one in dying.items()}
        for death, view in views.items():
            stack.enter_context(reacting(dying[death].settings, view))
        for death, view in views.items():
            assert_each_once(view)
            assert_reported_after_copies(dying[death].settings)


def test_lost_offsets_derive_only_what_is_not_reported(settings: Settings, keyring: Keyring) -> None:
    with opened(settings, keyring) as view:
        append_all(settings, life())
        with reacting(settings, view):
            assert_each_once(view)
        append_all(settings, [published("sports", "p5")])
        view.catch_up(10)
        before = assert_reported_after_copies(settings)
        gateway = settings.gateway.model_copy(update={"reactor_group": f"new-{settings.kafka.topic}"})
        with reacting(settings.model_copy(update={"gateway": gateway}), view):
            wait_until(lambda: statuses(view).get("p5") == "delivered", 30, "the last message is delivered")
        after = assert_reported_after_copies(settings)
        assert after[MESSAGE_POSTED] - before[MESSAGE_POSTED] == 1


def test_two_reactors_of_one_group_share_topics(settings: Settings, keyring: Keyring) -> None:
    with opened(settings, keyring) as view, opened(settings, keyring) as other:
        with reacting(settings, view), reacting(settings, other):
            append_all(settings, life())
            assert_each_once(view)
        assert_each_once(other)


def test_copies_that_a_mailbox_may_have_forgotten_are_looked_up_in_the_ledger(
    settings: Settings, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reactor_module, "_FORGOTTEN_S", -60.0)
    with opened(settings, keyring) as view:
        append_all(settings, life())
        view.catch_up(10)
        row = view.get(TopicMessageRow, "news/p1")
        assert row is not None
        fields = {"topic": "news", "message_id": "p1", "from": "ann", "kind": "note", "body": "{}"}
        first = Delivery(Publication.model_validate(fields), row, view.get).copy_id("ann")
        moment = pa.array([row.published_at], pa.timestamp("us", "UTC"))
        columns = {"door": [TOPIC_DOOR], "type": [MESSAGE_POSTED], "ce_id": [first], "logged_at": moment}
        streams = {"stream_kind": ["mailbox"], "stream_id": ["default/ann"]}
        verdicts = {"verdict": ["rejected"], "reason": ["mailbox_full"]}
        write_deltalake(settings.table_path(LEDGER), pa.table({**columns, **streams, **verdicts}))
        with reacting(settings, view):
            wait_until(lambda: set(statuses(view).values()) == {"delivered"}, 30, "all are delivered")
        view.catch_up(10)
        assert copies_in(view) == sorted(COPIES - {("ann", "p1")})
        row = view.get(TopicMessageRow, "news/p1")
        assert row is not None and (row.refused_count, row.refused) == (1, ["ann"])


def test_offsets_are_committed_between_large_messages(
    settings: Settings, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reactor_module, "_COPIES_AT_ONCE", 2)
    monkeypatch.setattr(reactor_module, "_UNACKNOWLEDGED_MOST", 2)
    steps: list[str] = []
    with opened(settings, keyring) as view:
        append_all(settings, life())
        with reacting(settings, view, step=steps.append):
            assert_each_once(view)
    turns = " ".join(steps).split("seen")
    assert max(turn.count("committed") for turn in turns) > 1


def test_a_bug_in_one_delivery_stops_no_other(
    settings: Settings, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Delivery._copy_for_first

    def fail(delivery: Delivery, body: Publication) -> dict[str, Any]:
        if body.message_id == "p1":
            raise RuntimeError("a bug")
        return original(delivery, body)

    monkeypatch.setattr(Delivery, "_copy_for_first", fail)
    with opened(settings, keyring) as view, reacting(settings, view):
        append_all(settings, life())
        expected = {**dict.fromkeys(EXPECTED, "delivered"), "p1": "publishing"}
        wait_until(lambda: statuses(view) == expected, 30, "the others are delivered")


def test_a_stopped_agent_loses_its_subscriptions(settings: Settings, keyring: Keyring) -> None:
    joining = AgentJoined(
        agent_name="bo", request_id="j", task="count", capabilities=[], public_key=public_key()
    )
    with opened(settings, keyring) as view:
        append_all(settings, [joining.record(**BY), subscription("news", "bo")])
        view.catch_up(10)
        # Also subscriptions from before the reactor's start.
        with reacting(settings, view):
            append_all(settings, [subscription("sports", "bo"), subscription("news", "cy")])
            view.catch_up(10)
            append_all(settings, [AgentStopped(agent_name="bo", request_id="e").record(**BY)])

            def left() -> set[tuple[str, str]]:
                return {(row.topic, row.subscriber) for row in view.live(SubscriptionRow)}

            wait_until(lambda: left() == {("news", "cy")}, 20, "the subscriptions have ended")
