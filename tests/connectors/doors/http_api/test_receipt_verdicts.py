"""The verdicts for the receipts of agents' messages: whether they have come into the mailbox (LM-05)."""

from __future__ import annotations

import itertools
import json

import pytest

from connectors.doors.http_api.routes.stream_routes import ReceiptVerdicts
from connectors.hub.live.settled_feed import SettledRecord
from schemas.wire.record import Position

pytestmark = pytest.mark.requirement("LM-05")
_offsets = itertools.count()


def record(
    stream: str, kind: str, ce_id: str, verdict: str, reason: str | None, by: str, value: bytes = b""
) -> SettledRecord:
    """A settled record at the next offset."""
    position = Position(0, next(_offsets))
    return SettledRecord(
        position, stream, kind, ce_id, by, verdict, reason, None, False, None, None, 0, value or None
    )


def said(
    number: int = 1, verdict: str = "accepted", to: str = "bob", value: bytes | None = None
) -> SettledRecord:
    """A message of ann."""
    body = json.dumps({"to": to, "message_id": f"m{number}"}).encode() if value is None else value
    return record("agent/ann", "agent.said", f"ce{number}", verdict, None, "mqtt/unverified", body)


def posted(
    number: int = 1, verdict: str = "accepted", reason: str | None = None, by: str = "mqtt/ann"
) -> SettledRecord:
    """The posting of a message of ann."""
    return record("mailbox/default/bob", "message.posted", f"m{number}", verdict, reason, by)


def verdicts(*, may_be_full: bool = True) -> ReceiptVerdicts:
    """Verdicts of mailboxes that may be full, or have room for certain."""
    return ReceiptVerdicts(lambda to, message_id: may_be_full)


def test_a_message_that_the_mailbox_refuses_is_rejected_at_its_own_position() -> None:
    found, first, second = verdicts(), said(1), said(2)
    assert found.of([first, second]) == []
    refused = posted(1, "rejected", "mailbox_full")
    assert found.of([refused]) == [(*first.position, "rejected", "mailbox_full")]
    assert found.of([posted(2)]) == [(*second.position, "accepted", None)]
    again = said(1, "duplicate")
    assert found.of([again]) == [(*again.position, "rejected", "mailbox_full")], "its sender repeats it"
    other = said(2, "duplicate")
    assert found.of([other]) == [(*other.position, "duplicate", None)]


def test_a_message_to_a_mailbox_with_room_waits_for_nothing() -> None:
    found, message = verdicts(may_be_full=False), said()
    assert found.of([message, posted()]) == [(*message.position, "accepted", None)]


def test_a_refused_posting_may_be_settled_before_its_message() -> None:
    found, message = verdicts(may_be_full=False), said()
    assert found.of([posted(1, "rejected", "mailbox_full"), message]) == [
        (*message.position, "rejected", "mailbox_full")
    ]


def test_a_posting_of_another_sender_with_the_same_id_decides_nothing() -> None:
    found, message = verdicts(), said()
    other = posted(1, "rejected", "mailbox_full", by="mqtt/eve")
    assert found.of([message, other, posted(1, by="http/ann")]) == []
    assert found.of([posted(1, "rejected", "seq_conflict")]) == [(*message.position, "accepted", None)]


def test_rejected_messages_and_unreadable_ones_have_their_own_verdict() -> None:
    found = verdicts()
    for message in (said(verdict="rejected"), said(value=b"["), said(value=b"[]"), said(value=b"{}")):
        assert found.of([message]) == [(*message.position, message.verdict, None)]


def confirmed(number: int = 1, verdict: str = "accepted", reason: str | None = None) -> SettledRecord:
    """A confirmation of ann."""
    return record("agent/ann", "agent.confirmed", f"ce{number}", verdict, reason, "mqtt/unverified", b"{}")


def claimed(number: int = 1, verdict: str = "accepted", reason: str | None = None) -> SettledRecord:
    """The claim of the messages that ann has confirmed."""
    return record("mailbox/default/ann", "message.claimed", f"ce{number}", verdict, reason, "mqtt/ann")


@pytest.mark.requirement("DL-32")
@pytest.mark.parametrize("is_claim_first", [False, True])
def test_the_verdict_on_a_confirmation_is_that_of_its_claim(is_claim_first: bool) -> None:
    found, first = verdicts(), confirmed(1)
    refused = claimed(1, "rejected", "unknown_stream")
    records = [refused, first] if is_claim_first else [first, refused]
    assert found.of(records) == [(*first.position, "rejected", "unknown_stream")]
    second, again = confirmed(2), confirmed(2)
    assert found.of([second, again]) == []
    assert found.of([claimed(2)]) == [(*one.position, "accepted", None) for one in (second, again)]


@pytest.mark.requirement("DL-32")
def test_the_verdict_on_a_forged_confirmation_waits_for_no_claim() -> None:
    forged = confirmed(1, "rejected", "bad_signature")
    assert verdicts().of([forged]) == [(*forged.position, "rejected", "bad_signature")]
