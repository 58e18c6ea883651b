"""Posting a message: one model for every door, one row for each message id, in the mailbox of its key."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.fold import settle
from schemas.streams.mailboxes.message import Message, MessageBodyRow, MessageRow
from schemas.tables.ledger import ledger_row, record_of_row
from tests.schemas.job_records import KEYRING, START_US, document_record, said
from tests.schemas.mailbox_records import row_of
from tests.schemas.stream_records import MAILBOX_KEY, as_read, message
from trunkline_agent.wire.ids import is_name, parse_stream_key, stream_key
from trunkline_agent.wire.message_fields import DESCRIPTION
from trunkline_agent.wire.moments import has_come


def post(body: dict[str, Any], entries: Entries, **changed: Any) -> Settled:
    """Settle the posting of a message."""
    return settle(
        document_record(body, "message.posted", **{"key": MAILBOX_KEY, **changed}), entries, KEYRING, Entries()
    )


CONTENTS = (
    {},
    {"body": "other"},
    {"kind": "tell", "priority": "high", "from_verified": True},
    {"in_reply_to": "m0", "thread": "t1", "broadcast_id": "b1", "subject": "stars ☃"},
    {"sent_at": "2026-11-21T10:00:00Z", "expires_at": "2026-11-22T10:00:00Z", "content_type": "text/plain"},
)


@pytest.mark.requirement("CM-04")
@given(st.lists(st.tuples(st.sampled_from(("m1", "m2", "m3")), st.sampled_from(CONTENTS)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_each_message_id_is_posted_once_whoever_posts_it(sent: list[tuple[str, dict[str, Any]]]) -> None:
    entries, posted = Entries(), dict[str, dict[str, Any]]()
    for offset, (message_id, changed) in enumerate(sent):
        body = message(message_id, **changed)
        settled = post(body, entries, offset=offset, ce_id=f"id {offset}", sender=f"http/p{offset}")
        if message_id in posted:
            same = posted[message_id] == body
            expected = ("duplicate", None) if same else ("rejected", "seq_conflict")
            assert (said(settled), settled.changes) == (expected, ())
        else:
            posted[message_id] = body
            assert (said(settled), settled.status_after) == (("accepted", None), "unread")
            row = row_of(settled)
            assert [change.view for change in settled.changes] == ["message_bodies", "mailbox"]
            assert {change.key for change in settled.changes} == {f"default/bo/{message_id}"}
            assert (row.message_id, row.posted_at) == (message_id, START_US + offset * 1000)
    assert len(list(entries.with_prefix("m/"))) == len(posted)


def test_a_row_says_all_that_the_message_says() -> None:
    full = {"realm": "lab", "to": "x.y", "from_verified": True, "priority": "low", "from_task": "t7"}
    full |= CONTENTS[3] | CONTENTS[4]
    settled = post(message(**full), Entries(), key=b"mailbox/lab/x.y")
    body = MessageBodyRow("lab", "x.y", "m1", '{"stars":3}', "text/plain")
    assert settled.changes[0].row == body
    assert row_of(settled) == MessageRow(
        realm="lab",
        recipient="x.y",
        message_id="m1",
        status="unread",
        sender="ann",
        from_verified=True,
        kind="ask",
        priority="low",
        from_task="t7",
        in_reply_to="m0",
        thread="t1",
        broadcast_id="b1",
        sent_at="2026-11-21T10:00:00Z",
        expires_at="2026-11-22T10:00:00Z",
        posted_at=START_US,
        subject="stars ☃",
    )


@pytest.mark.requirement("DL-42")
@given(st.text(max_size=210) | st.sampled_from(("x" * 200, "x" * 201, "")))
def test_a_subject_is_one_line_of_at_most_200_characters_at_each_place_that_checks_it(text: str) -> None:
    is_valid = 1 <= len(text) <= 200 and not any(
        one in "\u2028\u2029" or unicodedata.category(one) == "Cc" for one in text
    )
    assert is_valid == (DESCRIPTION[0].fault(text, is_name) is None)
    assert is_valid == (said(post(message(subject=text), Entries())) == ("accepted", None))
    # JSON can have half a character, and UTF-8 cannot.
    assert DESCRIPTION[0].fault(text + "\ud800", is_name) is not None


def test_what_a_message_does_not_say_has_its_default() -> None:
    body = message()
    del body["realm"]
    settled = post(body, Entries())
    text, row = settled.changes[0].row, row_of(settled)
    assert isinstance(text, MessageBodyRow)
    assert (row.realm, row.priority, row.from_verified, row.from_task) == ("default", "normal", False, None)
    assert (text.content_type, row.thread, row.sent_at) == ("application/json", None, None)
    same = Message.model_validate(body)
    assert (same.realm, same.priority, same.content_type) == (row.realm, row.priority, text.content_type)


def test_a_message_without_a_realm_lies_in_no_other_realm() -> None:
    body = message()
    del body["realm"]
    assert said(post(body, Entries(), key=b"mailbox/None/bo")) == ("rejected", "malformed")
    assert said(post(message(realm=None), Entries(), key=b"mailbox/None/bo")) == ("rejected", "malformed")
    assert said(post(message(to=7), Entries(), key=b"mailbox/default/7")) == ("rejected", "malformed")


def test_the_wire_has_from_and_to_and_the_program_sender_and_recipient() -> None:
    made = Message.model_validate({"message_id": "m1", "from": "ann", "to": "bo", "kind": "ask", "body": ""})
    assert (made.sender, made.recipient) == ("ann", "bo")
    wire = made.model_dump(mode="json", by_alias=True)
    assert wire["from"] == "ann"
    assert not {"sender", "recipient"} & set(wire)
    assert Message.model_validate(wire) == made


@pytest.mark.parametrize("names", [("sender",), ("recipient",), ("sender", "recipient"), ("sender", "from")])
def test_a_body_with_the_names_of_the_program_is_malformed(names: tuple[str, ...]) -> None:
    body = message()
    aliases = {"sender": "from", "recipient": "to"}
    for name in names:
        if name in aliases:
            body[name] = body["from"] if name == "sender" else "bo"
            if aliases[name] not in names:
                del body[aliases[name]]
    settled = post(body, Entries())
    assert said(settled) == ("rejected", "malformed")


@pytest.mark.parametrize(
    "changed",
    [
        {"message_id": "a/b"},
        {"message_id": ""},
        {"message_id": 7},
        {"from": "../ann"},
        {"from": None},
        {"kind": ""},
        {"kind": "x" * 129},
        {"priority": "urgent"},
        {"priority": None},
        {"body": {"text": "x"}},
        {"body": None},
        {"from_verified": 1},
        {"content_type": "x" * 129},
        {"thread": "a b"},
        {"in_reply_to": "#"},
        {"broadcast_id": "+"},
        {"sent_at": "x" * 41},
        {"expires_at": 7},
        {"expires_at": "2026-11-22"},
        {"expires_at": "2026-11-22T10:00:00"},
        {"expires_at": "2026-11-22T10:00:00+01:00"},
        {"expires_at": "2026-02-30T10:00:00Z"},
        {"from_task": "a/b"},
        {"to": "cy"},
        {"realm": "lab"},
        {"more": 1},
    ],
)
def test_a_field_that_is_wrong_makes_a_message_malformed(changed: dict[str, Any]) -> None:
    entries = Entries()
    assert said(post(message(**changed), entries)) == ("rejected", "malformed")
    assert entries.stored() == {}


def test_the_record_that_a_door_makes_is_accepted_and_refolded() -> None:
    body = message(realm="lab")
    record = as_read(Message.model_validate(body).record(door="http", principal="ann"), 3)
    assert record.key == b"mailbox/lab/bo"
    entries, refolded = Entries(), Entries()
    settled = settle(record, entries, KEYRING, Entries())
    assert settled.envelope is not None
    assert (said(settled), settled.envelope.ce_id) == (("accepted", None), "m1")
    row = ledger_row(record, settled, KEYRING)
    assert (row.stream_kind, row.stream_id, row.wire) == ("mailbox", "lab/bo", None)
    assert settle(record_of_row(row, KEYRING), refolded, KEYRING, Entries()).changes == settled.changes
    assert refolded.stored() == entries.stored()


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)


@pytest.mark.requirement("CM-01")
@given(NAMES, NAMES)
def test_the_key_of_a_mailbox_is_read_back_as_its_realm_and_agent(realm: str, agent: str) -> None:
    assert parse_stream_key(stream_key("mailbox", f"{realm}/{agent}").encode()) == (
        "mailbox",
        f"{realm}/{agent}",
    )


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "bo",
        "default/",
        "/bo",
        "default//bo",
        "default/bo/",
        "default/bo/x",
        "../default/bo",
        "default/..",
        "./bo",
        "default/.bo",
        "-/bo",
        "default/+",
        "#/bo",
        "default/#",
        "default/b o",
        "default/bo\n",
        "default\x00/bo",
        "default/bo\x1b[31m",
        "default/b\u00f6",
        "default\\bo",
        "default/" + "x" * 129,
        "x" * 129 + "/bo",
        "default%2fbo",
    ],
)
def test_what_is_no_realm_and_no_agent_is_no_mailbox(name: str) -> None:
    assert parse_stream_key(f"mailbox/{name}".encode()) is None
    with pytest.raises(ValueError, match="not a name"):
        stream_key("mailbox", name)
    realm, _, agent = name.partition("/")
    with pytest.raises(ValidationError):
        Message.model_validate(message(realm=realm, to=agent))
    settled = post(message(realm=realm, to=agent), Entries(), key=f"mailbox/{name}".encode())
    assert (said(settled), settled.stream_kind) == (("rejected", "malformed"), "refused")


@given(st.text(max_size=40), st.text(max_size=40))
@settings(max_examples=80, deadline=None)
def test_whatever_stands_for_realm_and_agent_a_mailbox_is_malformed_or_its_own(realm: str, agent: str) -> None:
    try:
        key = f"mailbox/{realm}/{agent}".encode("ascii")
    except UnicodeEncodeError:
        key = MAILBOX_KEY
    settled = post(message(realm=realm, to=agent), Entries(), key=key)
    if settled.verdict == "accepted":
        assert {change.key for change in settled.changes} == {f"{realm}/{agent}/m1"}
    else:
        assert settled.reason == "malformed"


@pytest.mark.parametrize(
    ("time", "since_us"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:01.5Z", 1_500_000),
        ("1970-01-02T00:00:00.000001Z", 86_400_000_001),
        ("1970-01-01T00:00:00.0000001Z", 1),
        ("1970-01-01T00:00:00.000000999Z", 1),
        ("2026-11-21T10:00:00.123456789Z", 1_795_255_200_123_457),
        ("1969-12-31T23:59:59.999999Z", -1),
        ("9999-12-31T23:59:59.999999999Z", 253_402_300_800_000_000),
    ],
)
def test_a_time_has_come_from_its_very_microsecond_on(time: str, since_us: int) -> None:
    assert not has_come(time, since_us - 1)
    assert has_come(time, since_us)
    assert has_come(time, since_us + 1)
