"""A webhook as its stream settles it (WH-01): its address, its secrets, and its states."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import UnsealError, webhook_secret_purpose
from schemas.streams.webhook.webhooks import (
    WebhookPaused,
    WebhookRemoved,
    WebhookResumed,
    WebhookRow,
    WebhookSet,
    key_of_request,
    url_parts,
    webhook_secrets,
)
from schemas.wire.record import OutgoingRecord
from tests.schemas.hub_records import webhook
from tests.schemas.job_records import KEYRING, START_US, said
from tests.schemas.mailbox_records import S_US
from tests.schemas.mailbox_records import at as settled_at
from tests.schemas.stream_records import accepted_and_refolded, as_read

pytestmark = pytest.mark.requirement("WH-01")

BY: dict[str, Any] = {"door": "http", "principal": "operator"}


def setting(request_id: str = "w1", secret: str = "first", **changed: Any) -> OutgoingRecord:  # noqa: S107
    """The record that sets the webhook of ann."""
    options = {"topic": None, "overlap_ms": 0, **changed}
    url = options.pop("url", "https://example.org/in")
    return WebhookSet(
        sealed_secret=KEYRING.seal(secret.encode(), webhook_secret_purpose("ann")),
        name="ann",
        url=url,
        request_id=request_id,
        **options,
    ).record(**BY)


def pause(request_id: str = "p1", **changed: Any) -> OutgoingRecord:
    """The record that pauses the webhook."""
    return WebhookPaused(name="ann", request_id=request_id, reason="broken", **changed).record(**BY)


def resuming(request_id: str = "r1") -> OutgoingRecord:
    """The record that resumes the webhook."""
    return WebhookResumed(name="ann", request_id=request_id).record(**BY)


def removal(request_id: str = "x1") -> OutgoingRecord:
    """The record that removes the webhook."""
    return WebhookRemoved(name="ann", request_id=request_id).record(**BY)


def at(entries: Entries, made: OutgoingRecord, now_us: int) -> Settled:
    """Settle a record that is logged at this time."""
    return settled_at(now_us - START_US, made, entries)


def row_of(settled: Settled) -> WebhookRow:
    """The row that an accepted record makes."""
    assert said(settled) == ("accepted", None), settled.why
    (change,) = settled.changes
    assert (change.view, change.key) == ("registry_webhooks", "ann")
    assert isinstance(change.row, WebhookRow)
    return change.row


def refused(settled: Settled, reason: str, why: str) -> None:
    """The record changes nothing, for this reason."""
    assert (settled.reason, settled.changes) == (reason, ())
    assert why in str(settled.why)


def test_a_webhook_is_set_paused_resumed_and_removed_and_each_change_is_a_revision():
    entries = Entries()
    row = row_of(at(entries, setting(), START_US))
    assert (row.status, row.revision, row.url, row.topic) == ("active", 1, "https://example.org/in", None)
    assert (row.set_by, row.set_at) == ("http/operator", START_US)
    row = row_of(at(entries, pause(), START_US + S_US))
    assert (row.status, row.revision, row.why_paused, row.is_live) == ("paused", 2, "broken", True)
    row = row_of(at(entries, resuming(), START_US + 2 * S_US))
    assert (row.status, row.revision, row.why_paused) == ("active", 3, None)
    row = row_of(at(entries, removal(), START_US + 3 * S_US))
    assert (row.status, row.revision, row.is_live) == ("removed", 4, False)
    row = row_of(at(entries, setting("w2"), START_US + 4 * S_US))
    assert (row.status, row.revision) == ("active", 5)


def test_a_pause_of_an_earlier_revision_does_not_pause_the_new_address():
    entries = Entries()
    row_of(at(entries, setting(), START_US))
    row_of(at(entries, setting("w2", url="https://example.org/new"), START_US))
    refused(at(entries, pause(revision=1), START_US), "illegal_transition", "has changed since")
    assert row_of(at(entries, pause("p2", revision=2), START_US)).status == "paused"


@pytest.mark.parametrize(
    ("before", "record", "reason", "why"),
    [
        ((), pause(), "unknown_stream", "no webhook"),
        ((), removal(), "unknown_stream", "no webhook"),
        ((setting(),), resuming(), "illegal_transition", "not paused"),
        ((setting(), pause()), pause("p2"), "illegal_transition", "the webhook is paused"),
        ((setting(), removal()), removal("x2"), "illegal_transition", "the webhook is removed"),
        ((setting(), removal()), resuming(), "illegal_transition", "not paused"),
        ((setting(),), setting("w2", topic="news"), "illegal_transition", "another topic"),
        ((setting(topic="news"),), setting("w2"), "illegal_transition", "another topic"),
    ],
)
def test_a_change_that_does_not_fit_the_state_is_rejected(before, record, reason, why):
    entries = Entries()
    for one in before:
        row_of(at(entries, one, START_US))
    refused(at(entries, record, START_US), reason, why)


def test_a_repeated_request_is_a_duplicate_and_one_with_other_content_a_conflict():
    entries = Entries()
    row_of(at(entries, setting(), START_US))
    row_of(at(entries, pause(), START_US))
    assert said(at(entries, setting(), START_US)) == ("duplicate", None)
    refused(at(entries, setting(url="https://example.org/b"), START_US), "seq_conflict", "other content")


def test_the_previous_secret_signs_until_its_overlap_ends_and_a_removed_webhook_has_none():
    entries = Entries()

    def secrets(seconds: float) -> list[str]:
        return webhook_secrets("ann", entries, KEYRING, START_US + int(seconds * S_US))

    assert secrets(0) == []
    row_of(at(entries, setting(), START_US))
    assert secrets(0) == ["first"]
    row = row_of(at(entries, setting("w2", "second", overlap_ms=10_000), START_US + S_US))
    assert row.old_secret_ends_at == START_US + 11 * S_US
    assert secrets(10.9) == ["second", "first"]
    assert secrets(11) == ["second"]
    assert row_of(at(entries, setting("w3", "third"), START_US + 2 * S_US)).old_secret_ends_at is None
    assert secrets(3) == ["third"]
    row_of(at(entries, removal(), START_US + 4 * S_US))
    assert secrets(5) == []


def test_only_the_request_that_set_the_newest_secret_finds_its_master_key():
    entries = Entries()
    row_of(at(entries, setting(), START_US))
    assert key_of_request(entries, "w1") == KEYRING.active
    assert key_of_request(entries, "w2") is None
    row_of(at(entries, removal(), START_US))
    assert key_of_request(entries, "w1") is None


@pytest.mark.requirement("CM-05")
def test_no_row_has_the_secret_and_its_sealed_text_opens_for_this_webhook_only():
    entries = Entries()
    settled = at(entries, setting(secret="whsec_c2VjcmV0"), START_US)
    record = setting(secret="whsec_c2VjcmV0")
    assert b"c2VjcmV0" not in (record.value or b"")
    assert "sealed" not in "".join(row_of(settled).__struct_fields__)
    with pytest.raises(UnsealError):
        webhook_secrets("bo", entries, KEYRING, START_US)


def test_the_ledgers_rows_fold_to_the_same_state():
    made = (setting(), pause(), resuming(), setting("w2", "second", overlap_ms=5), removal(), setting("w3"))
    accepted_and_refolded(as_read(one, number) for number, one in enumerate(made))


@pytest.mark.requirement("WH-03")
@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://example.org", ("https", "example.org", 443, "/")),
        ("http://example.org?a=1", ("http", "example.org", 80, "/?a=1")),
        ("https://example.org:8443/a/b?c=d%20e", ("https", "example.org", 8443, "/a/b?c=d%20e")),
        ("https://[2001:db8::1]:1/x", ("https", "2001:db8::1", 1, "/x")),
    ],
)
def test_a_url_has_scheme_host_port_and_target(url, parts):
    assert tuple(url_parts(url)) == parts


@pytest.mark.requirement("WH-03")
@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "ftp://example.org/",
        "HTTPS://example.org/",
        "https:///path",
        "https://ann:secret@example.org/",
        "https://ann@example.org/",
        "https://example.org\\@evil.example/",
        "https://example.org/#part",
        "https://example.org:0/",
        "https://example.org:65536/",
        "https://example.org:+80/",
        "https://example.org:８０/",
        "https://example.org/a b",
        "https://example.org/\r\nX-Evil: 1",
        "https://exämple.org/",
        "https://example.org/ä",
        "https://[::1/",
        "https://example.org/" + "a" * 2048,
    ],
)
def test_a_url_with_a_user_a_fragment_or_another_form_is_refused(url):
    with pytest.raises(ValueError, match=r"URL|port"):
        url_parts(url)
    with pytest.raises(ValidationError):
        WebhookSet.model_validate(webhook(url=url))


@pytest.mark.requirement("WH-03")
@given(st.text(max_size=40))
def test_no_text_makes_the_check_of_urls_fail_otherwise(text):
    for url in (text, f"https://{text}", f"https://example.org{text}"):
        try:
            found = url_parts(url)
        except ValueError:
            continue
        assert found.target.startswith("/")
        assert "@" not in found.host
