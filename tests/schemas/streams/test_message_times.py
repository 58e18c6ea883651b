"""Messages that expire or wait (DL-21, DL-22), as the fold settles them by the time of each record."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.streams.agents.mqtt_agents import AgentSaid
from schemas.streams.mailboxes.mailbox_bodies import (
    LIMIT_MOST,
)
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import OutgoingRecord
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import (
    HUB,
    LEASE_US,
    S_US,
    a_claim,
    a_clearing,
    a_due,
    a_lease,
    a_nack,
    a_reading,
    an_ack,
    an_expiry,
    at,
    mailbox_of,
    post_at,
    refused,
    row_of,
    rows_of,
    statuses,
)
from tests.schemas.stream_records import message
from trunkline_agent.wire.message_fields import DURATION_S_MOST
from trunkline_agent.wire.moments import has_come, iso_moment, moment_of

REACTOR: dict[str, Any] = {"door": "reactor", "principal": "reactor"}
MINUTE_MS = 60_000


def due(message_id: str = "m1", ce_id: str = "d1") -> OutgoingRecord:
    """The reactor's record that delivers a delayed message."""
    return a_due(message_id, ce_id=ce_id, by=REACTOR)


def over(message_id: str = "m1", ce_id: str = "x1") -> OutgoingRecord:
    """The reactor's record that ends a message as expired."""
    return an_expiry(message_id, ce_id=ce_id, by=REACTOR)


@pytest.mark.requirement("DL-21")
def test_a_message_expires_by_the_time_of_the_log_and_not_a_microsecond_earlier() -> None:
    entries = Entries()
    assert row_of(post_at(0, entries, expires_in_ms=MINUTE_MS)).expires_at == iso_moment(START_US + 60 * S_US)
    assert refused(at(60 * S_US - 1, over(), entries)) == ("illegal_transition", "unread")
    found = at(60 * S_US, over(ce_id="x2"), entries)
    assert (found.status_after, row_of(found).ended_at) == ("expired", START_US + 60 * S_US)
    assert rows_of(at(61 * S_US, a_claim("c1", by=HUB), entries)) == []


@pytest.mark.requirement("DL-21")
def test_a_leased_message_expires_when_its_lease_has_ended_and_not_before() -> None:
    entries = mailbox_of("m1", expires_in_ms=10_000)
    at(9 * S_US, a_lease("l1"), entries)
    assert refused(at(20 * S_US, over(), entries)) == ("illegal_transition", "leased")
    assert at(21 * S_US, a_nack("m1", "l1"), entries).status_after == "unread"
    assert at(21 * S_US, over(ce_id="x2"), entries).status_after == "expired"


@pytest.mark.requirement("DL-21")
def test_a_holder_may_acknowledge_a_message_that_expired_under_its_lease() -> None:
    entries = mailbox_of("m1", expires_in_ms=10_000)
    at(9 * S_US, a_lease("l1"), entries)
    assert at(9 * S_US + LEASE_US - 1, an_ack("m1", "l1"), entries).status_after == "claimed"


@pytest.mark.requirement("DL-22")
def test_a_delayed_message_is_handed_out_to_nobody_before_its_time() -> None:
    entries = Entries()
    posted = post_at(0, entries, deliver_after_ms=MINUTE_MS, priority="high")
    assert (posted.status_after, row_of(posted).deliver_at) == ("delayed", START_US + 60 * S_US)
    post_at(0, entries, "m2")
    for made in (
        a_lease("l1", limit=100, message_ids=["m1"]),
        a_claim("c0", message_ids=["m1"], limit=LIMIT_MOST, by=HUB),
        a_claim("c1", message_ids=["m1"], if_unread=True, limit=LIMIT_MOST, by=HUB),
    ):
        assert rows_of(at(61 * S_US, made, entries)) == []
    assert statuses(at(61 * S_US, a_claim("c2", by=HUB), entries)) == {"m2": "claimed"}
    for made in (
        a_reading("m1", by=HUB),
        an_ack("m1", "l1"),
        a_nack("m1", "l1"),
    ):
        assert refused(at(61 * S_US, made, entries)) == ("illegal_transition", "delayed")


@pytest.mark.requirement("DL-22")
def test_a_delayed_message_is_delivered_at_its_time_once_and_behind_what_came_meanwhile() -> None:
    entries = mailbox_of("m1", deliver_after_ms=MINUTE_MS)
    post_at(30 * S_US, entries, "m2")
    assert refused(at(60 * S_US - 1, due(), entries)) == ("illegal_transition", "delayed")
    found = at(60 * S_US, due(ce_id="d2"), entries)
    assert (found.status_after, row_of(found).posted_at) == ("unread", START_US + 60 * S_US)
    # Two gateways append the same record, and a later timer another one.
    assert said(at(60 * S_US, due(ce_id="d2"), entries)) == ("duplicate", None)
    assert refused(at(60 * S_US, due(ce_id="d3"), entries)) == ("illegal_transition", "unread")
    assert list(statuses(at(61 * S_US, a_claim("c1", by=HUB), entries))) == ["m2", "m1"]


@pytest.mark.requirement("DL-22")
def test_a_message_that_is_posted_again_while_it_is_delayed_or_a_week_after_is_the_same() -> None:
    week_ms = 7 * 24 * 3600 * 1000
    entries = mailbox_of("m1", deliver_after_ms=2 * week_ms)
    again = post_at(2 * week_ms * 1000 - 1, entries, deliver_after_ms=2 * week_ms)
    assert (again.verdict, again.status_after) == ("duplicate", "delayed")
    assert refused(post_at(S_US, entries, body="other")) == ("seq_conflict", "delayed")
    at(2 * week_ms * 1000, due(), entries)
    at(2 * week_ms * 1000, a_claim("c1", by=HUB), entries)
    again = post_at(3 * week_ms * 1000, entries, deliver_after_ms=2 * week_ms)
    assert (again.verdict, again.status_after) == ("duplicate", None)


@pytest.mark.requirement("DL-22")
def test_a_delayed_message_may_expire_before_anybody_delivered_it() -> None:
    entries = mailbox_of("m1", deliver_after_ms=1000, expires_in_ms=2000)
    assert refused(at(2 * S_US, due(), entries)) == ("illegal_transition", "delayed")
    assert at(2 * S_US, over(), entries).status_after == "expired"
    assert refused(at(2 * S_US, due(ce_id="d2"), entries)) == ("after_terminal", None)


@pytest.mark.requirement("DL-22")
def test_clearing_a_mailbox_ends_its_delayed_messages_too() -> None:
    entries = mailbox_of("m1", deliver_after_ms=1000)
    post_at(0, entries, "m2")
    found = at(S_US, a_clearing("x", by=HUB), entries)
    assert statuses(found) == {"m2": "cleared", "m1": "cleared"}
    assert {key for key in entries.stored() if key.startswith(("m/", "d/"))} == set()


@pytest.mark.requirement("DL-21")
@pytest.mark.requirement("DL-22")
@pytest.mark.parametrize(
    "times",
    [
        {"expires_in_ms": 0},
        {"expires_in_ms": DURATION_S_MOST * 1000 + 1},
        {"deliver_after_ms": 0},
        {"deliver_after_ms": 1.5},
        {"deliver_after_ms": "1"},
        {"deliver_after_ms": True},
        {"deliver_after_ms": 1000, "expires_in_ms": 1000},
        {"expires_at": "2027-01-15T08:01:00Z", "expires_in_ms": 1000},
    ],
)
def test_times_that_make_no_sense_are_refused(times: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate(message(**times))


@pytest.mark.requirement("DL-22")
def test_an_agents_message_over_mqtt_that_would_expire_before_its_delivery_is_refused() -> None:
    body = {"message_id": "m1", "to": "bo", "kind": "ask", "body": 1, "seq": 1}
    assert AgentSaid.model_validate({**body, "deliver_after_s": 1, "expires_in_s": 1.5}).expires_in_s == 1.5
    with pytest.raises(ValidationError, match="would expire before it is delivered"):
        AgentSaid.model_validate({**body, "deliver_after_s": 2, "expires_in_s": 1.5})


def test_a_moment_is_the_first_microsecond_at_which_a_time_has_come() -> None:
    for text, more in (("2027-01-15T08:00:00Z", 0), ("2027-01-15T08:00:00.000001Z", 1)):
        assert moment_of(text) == START_US + more
    assert moment_of("2027-01-15T08:00:00.000001001Z") == START_US + 2
    assert not has_come("2027-01-15T08:00:00.000001001Z", START_US + 1)
    assert moment_of(iso_moment(START_US + 250_000)) == START_US + 250_000
