"""Derived records of webhooks: the subscription to a topic, and the removal with the mailbox (WH-01)."""

from __future__ import annotations

import pytest

from schemas.effects.recipients import has_mailbox
from schemas.keys.sealing import webhook_secret_purpose
from schemas.streams.principal.principals import (
    PrincipalAddition,
    PrincipalRevocation,
    token_hash,
)
from schemas.streams.topic.topic_registry import SubscriptionRow
from schemas.streams.webhook.webhooks import (
    WebhookRemoved,
    WebhookRow,
    WebhookSet,
)
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.reactor.followed import follows
from tests.schemas.job_records import KEYRING
from tests.schemas.stream_records import as_read

pytestmark = pytest.mark.requirement("WH-01")

BY = {"door": "http", "principal": "operator"}


class Log:
    """A folded log, and what the reactor derives from each record."""

    def __init__(self):
        self.folded = FoldedLog(KEYRING)
        self.count = 0

    def add(self, outgoing):
        """Settle a record; return what is derived from it."""
        self.count += 1
        record = as_read(outgoing, self.count)
        self.folded.add(record)
        topics = [row.topic for _, _, row in self.folded.rows["registry_subscriptions"].values()]
        return follows(record, self.folded.get, related=lambda *_: topics)

    def add_all(self, outgoing):
        """Settle a record and all that is derived from it."""
        found = self.add(outgoing)
        for one in found:
            self.add_all(one)
        return [one.type for one in found]


def setting(name="hook", topic=None, request_id="w1"):
    options = {"topic": topic, "overlap_ms": 0, "request_id": request_id}
    return WebhookSet(
        sealed_secret=KEYRING.seal(b"whsec_x", webhook_secret_purpose(name)),
        name=name,
        url="https://example.org/",
        **options,
    ).record(**BY)


def removal(name="hook", request_id="x1"):
    return WebhookRemoved(name=name, request_id=request_id).record(**BY)


def test_the_mailbox_of_a_topics_webhook_exists_and_is_subscribed_until_the_webhook_is_removed():
    log = Log()
    assert not has_mailbox(log.folded.get, "hook")
    assert log.add_all(setting(topic="news")) == ["topic.subscribed"]
    assert has_mailbox(log.folded.get, "hook")
    row = log.folded.get(SubscriptionRow, "news/hook")
    assert (row.status, row.subscribed_by) == ("subscribed", "reactor/reactor")
    assert log.add_all(removal()) == ["topic.unsubscribed"]
    assert not has_mailbox(log.folded.get, "hook")
    assert log.folded.get(SubscriptionRow, "news/hook").status == "unsubscribed"


def test_the_same_records_are_derived_again_under_the_same_ids():
    first, second = Log().add(setting(topic="news")), Log().add(setting(topic="news"))
    assert [one.ce_id for one in first] == [one.ce_id for one in second]
    log = Log()
    log.add_all(setting(topic="news"))
    assert [one.ce_id for one in log.add(setting(topic="news"))] == [one.ce_id for one in first]


def test_a_webhook_of_a_principals_mailbox_is_subscribed_to_nothing_and_removed_with_the_principal():
    log = Log()
    log.add_all(
        PrincipalAddition(principal="ann", role="worker", token_sha256=token_hash("0" * 64)).record(**BY)
    )
    assert log.add_all(setting("ann")) == []
    assert log.add_all(PrincipalRevocation(principal="ann").record(**BY)) == ["webhook.removed"]
    assert log.folded.get(WebhookRow, "ann").status == "removed"
    assert log.add(PrincipalRevocation(principal="ann").record(**BY)) == []
