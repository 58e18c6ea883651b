"""The records about messages in a mailbox: they say what they mean, name what they are, or are refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.streams.fold import RECORD_TYPES, settle
from schemas.streams.mailboxes.mailbox_bodies import (
    LIMIT_MOST,
    MAILBOX_MODELS,
    HandledMessage,
    MailboxClaim,
    MailboxClearing,
    MailboxClosing,
    MailboxLease,
    MailboxLimits,
    MailboxOpening,
    MessageAck,
    MessageExpiry,
    MessageExtension,
    MessageNack,
    MessageReading,
    MessageReclaim,
    MessagesHandled,
)
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import WireBody
from tests.schemas.job_records import KEYRING, START_US, document_record, said
from tests.schemas.mailbox_records import (
    AT,
    HUB,
    PUMP,
    a_claim,
    a_clearing,
    a_due,
    a_lease,
    a_nack,
    a_reading,
    a_reclaim,
    an_ack,
    an_expiry,
    at,
    mailbox_of,
    rows_of,
)
from tests.schemas.stream_records import MAILBOX_KEY, accepted_and_refolded, as_read, message

S_US = 1_000_000

pytestmark = pytest.mark.requirement("HH-06")

Make = type[WireBody]
# Records about a message and its lease, about a message, and about the mailbox.
BY_LEASE: tuple[Make, ...] = (MessageAck, MessageNack, MessageReclaim)
BY_MESSAGE: tuple[Make, ...] = (MessageReading, MessageExpiry)
BY_MAILBOX: tuple[Make, ...] = (MailboxClaim, MailboxLease, MailboxClearing)
NAMING = (
    *((one, "message_id") for one in BY_MESSAGE),
    *((one, "request_id") for one in BY_MAILBOX),
)
MADE = (
    *(make(**AT, message_id="m1", request_id="l1").record(**HUB) for make in BY_LEASE),
    *(make(**AT, message_id="m1").record(**HUB) for make in BY_MESSAGE),
    *(make(**AT, request_id="c1").record(**HUB) for make in BY_MAILBOX),
    a_due("m1", ce_id="d1", by=HUB),
    MailboxLimits(**AT, request_id="s1", pending_most=9, bytes_most=None).record(**HUB),
    MailboxClosing(**AT, request_id="g1").record(ce_id="g1", **HUB),
    MailboxOpening(**AT, request_id="g2").record(ce_id="g2", **HUB),
    MessageExtension(**AT, message_id="m1", request_id="l1", lease_ms=1000).record(ce_id="e1", **HUB),
    MessagesHandled(**AT, messages=[HandledMessage(message_id="m1", request_id="l1")]).record(**HUB),
)


def body_of(made: OutgoingRecord) -> dict[str, Any]:
    """Return the record's body."""
    body: dict[str, Any] = orjson.loads(made.value)
    return body


def test_there_is_a_model_and_a_record_for_every_type_of_a_mailbox() -> None:
    types = {name for name in RECORD_TYPES if name.startswith(("message.", "mailbox."))}
    assert set(MAILBOX_MODELS) == types
    assert {made.type for made in MADE} == types - {"message.posted"}


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.type)
def test_a_record_names_its_mailbox_in_key_and_body(made: OutgoingRecord) -> None:
    body = body_of(made)
    assert (made.stream, body["realm"], body["to"]) == ("mailbox/default/bo", "default", "bo")
    assert (made.door, made.principal, body["schema_version"]) == ("http", "bo", 1)
    assert "recipient" not in body


def test_every_record_that_a_door_makes_is_accepted_and_refolded() -> None:
    # A minute after the start.
    posted = [Message.model_validate(message(f"m{n}", expires_at="2027-01-15T08:01:00Z")) for n in range(5)]
    sent = [(0, one.record(door="http", principal="ann")) for one in posted]
    sent += [
        (0, a_lease("l1", limit=3)),
        (1, an_ack("m0", "l1")),
        (1, a_nack("m1", "l1")),
        (30 * S_US, a_reclaim("m2", "l1")),
        (30 * S_US, a_reading("m1")),
        (30 * S_US, a_claim("c1", limit=1)),
        (60 * S_US, an_expiry("m3")),
        (60 * S_US, a_clearing("x1")),
    ]
    rows, _ = accepted_and_refolded(
        as_read(made, offset, START_US + offset_us) for offset, (offset_us, made) in enumerate(sent)
    )
    assert {(row.stream_kind, row.stream_id, row.wire) for row in rows} == {("mailbox", "default/bo", None)}


def test_what_a_request_does_not_say_has_its_default() -> None:
    claim, lease = (body_of(a_claim("c1", by=HUB)), body_of(a_lease("l1", by=HUB)))
    assert (claim["limit"], lease["limit"], lease["lease_ms"]) == (100, 1, 30_000)
    short = {"schema_version": 1, "to": "bo", "request_id": "c1"}
    ids = [f"m{n}" for n in range(120)]
    for kind, wanted, lease_us in (("message.claimed", 100, None), ("message.leased", 1, 30_000_000)):
        settled = settle(document_record(short, kind, key=MAILBOX_KEY), mailbox_of(*ids), KEYRING, Entries())
        until = None if lease_us is None else START_US + lease_us
        assert [row.lease_until for row in rows_of(settled)] == [until] * wanted


def test_the_id_of_a_request_names_it_and_not_its_content() -> None:
    """Else the same request with other content would be another request, and be carried out."""
    assert a_claim("c1", limit=1, by=HUB).ce_id == a_claim("c1", limit=2, by=HUB).ce_id
    assert a_lease("l1", limit=1, lease_ms=5, by=HUB).ce_id == a_lease("l1", limit=1, lease_ms=6, by=HUB).ce_id
    assert a_nack("m1", "l1", reason="a", by=HUB).ce_id == a_nack("m1", "l1", reason="b", by=HUB).ce_id


def test_the_ids_of_two_requests_differ() -> None:
    others = [
        *MADE,
        *(make(**AT, message_id="m2", request_id="l1").record(**HUB) for make in BY_LEASE),
        *(make(**AT, message_id="m1", request_id="l2").record(**HUB) for make in BY_LEASE),
        *(make(**AT, message_id="m2").record(**HUB) for make in BY_MESSAGE),
        *(make(**AT, request_id="c2").record(**HUB) for make in BY_MAILBOX),
    ]
    for make, about in NAMING:
        one = make(**AT, **{about: "x1"})
        others += [one.record(**PUMP), one.record(door="http", principal="cy")]
        others += [make(**at, **{about: "x1"}).record(**HUB) for at in ({**AT, "realm": "lab"}, {"to": "cy"})]
    assert len({made.ce_id for made in others}) == len(others)


def test_what_the_reactor_makes_has_the_id_that_it_was_given() -> None:
    assert a_reclaim("m1", "l1", ce_id="follows", by=HUB).ce_id == "follows"
    assert an_expiry("m1", ce_id="follows", by=HUB).ce_id == "follows"


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", ["", "../x", "a/b", "#", "x" * 129])
def test_no_record_is_made_about_what_is_no_name(name: str) -> None:
    for make, about in NAMING:
        for arguments in ((name, "bo", "x"), ("default", name, "x"), ("default", "bo", name)):
            with pytest.raises(ValidationError):
                make(**dict(zip(("realm", "to", about), arguments, strict=True)))
    for make in BY_LEASE:
        with pytest.raises(ValidationError):
            make(**AT, message_id="m1", request_id=name)


@pytest.mark.parametrize("limit", [0, -1, 1001])
def test_no_record_is_made_for_none_or_for_too_many(limit: int) -> None:
    for make in (MailboxClaim, MailboxLease):
        with pytest.raises(ValidationError):
            make(**AT, request_id="c1", limit=limit)
    with pytest.raises(ValidationError):
        a_lease("l1", limit=1, lease_ms=0, by=HUB)
    with pytest.raises(ValidationError):
        a_lease("l1", limit=1, lease_ms=86_400_001, by=HUB)
    assert body_of(a_lease("l1", limit=1000, lease_ms=86_400_000, by=HUB))["limit"] == 1000


WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("message.claimed", {"limit": 0}),
    ("message.claimed", {"limit": 1001}),
    ("message.claimed", {"limit": True}),
    ("message.claimed", {"limit": "5"}),
    ("message.claimed", {"limit": None}),
    ("message.claimed", {"lease_ms": 5}),
    ("message.claimed", {"request_id": "a/b"}),
    ("message.claimed", {"request_id": None}),
    ("message.claimed", {"message_id": "m1"}),
    ("message.leased", {"lease_ms": 0}),
    ("message.leased", {"lease_ms": 1.5}),
    ("message.leased", {"lease_ms": 86_400_001}),
    ("mailbox.cleared", {"limit": 1}),
    ("mailbox.closed", {"limit": 1}),
    ("message.leased", {"held_most": 0}),
    ("message.leased", {"per_minute": 6001}),
    ("message.leased", {"message_ids": []}),
    ("message.acked", {"answers": [{"message_id": "m9"}]}),
    ("message.acked", {"answers": "m9"}),
    ("message.acked", {"message_id": None}),
    ("message.acked", {"reason": "x"}),
    ("message.nacked", {"reason": "x" * 501}),
    ("message.nacked", {"reason": "bell \u0007"}),
    ("message.nacked", {"request_id": 7}),
    ("message.reclaimed", {"message_id": "../m1"}),
    ("message.claimed", {"if_unread": 1}),
    ("message.leased", {"attempts_most": 0}),
    ("message.leased", {"attempts_most": 1001}),
    ("message.extended", {"lease_ms": 0}),
    ("message.extended", {"lease_ms": None}),
    ("message.extended", {"lease_ms": 86_400_001}),
    ("message.extended", {"reason": "x"}),
    ("message.read", {"request_id": "c1"}),
    ("message.expired", {"expires_at": "2027-01-15T08:01:00Z"}),
    ("message.read", {"to": "cy"}),
    ("message.read", {"realm": "lab"}),
    ("message.read", {"recipient": "bo"}),
    ("message.painted", {}),
)


@pytest.mark.parametrize(("kind", "changed"), WRONG)
def test_a_body_that_its_model_refuses_is_malformed(kind: str, changed: dict[str, Any]) -> None:
    good = {made.type: body_of(made) for made in MADE}
    body = good.get(kind, good["message.read"]) | changed
    for entries in (Entries(), mailbox_of("m1")):
        before = dict(entries.stored())
        settled = settle(document_record(body, kind, key=MAILBOX_KEY), entries, KEYRING, Entries())
        assert said(settled) == ("rejected", "malformed")
        assert entries.stored() == before


def test_what_is_said_of_a_refusal_quotes_nothing_of_the_record() -> None:
    entries = mailbox_of("m1")
    for made in MADE:
        for again in (made, made):
            settled = at(0, again, entries)
            assert not any(name in (settled.why or "") for name in ("m1", "l1", "c1"))


@pytest.mark.requirement("FQ-16")
def test_a_poll_that_has_happened_claims_what_another_door_has_leased() -> None:
    entries = mailbox_of("m1", "m2", "m3")
    assert len(rows_of(at(0, a_lease("l1", limit=2), entries))) == 2
    found = at(
        S_US,
        MailboxClaim(**AT, request_id="c2", message_ids=["m1", "m3"], limit=LIMIT_MOST).record(
            door="file", principal="bo"
        ),
        entries,
    )
    assert {(row.message_id, row.status) for row in rows_of(found)} == {("m1", "claimed"), ("m3", "claimed")}
    # The holder hears that it is too late, nobody gets it a second time, and its other lease goes on.
    late = at(2 * S_US, an_ack("m1", "l1"), entries)
    assert said(late) == ("rejected", "after_terminal")
    (acked,) = rows_of(at(3 * S_US, an_ack("m2", "l1"), entries))
    assert acked.status == "claimed"
    assert rows_of(at(3 * S_US, a_claim("c4", by=HUB), entries)) == []
