"""The checks of `./trunkline prove` on blobs: what is planted is found (DL-25)."""

from __future__ import annotations

import pytest

from tests.faults.prove.blob_messages import check_blobs
from tests.faults.prove.comparison import LOST, MISBEHAVED, Mail
from tests.faults.prove.delivery_notes import BlobSent, Delivery, Fetched

pytestmark = pytest.mark.requirement("DL-25")

BOX = "mailbox/default/bela"
SENT = BlobSent(BOX, "m1", "ab" * 32, 5)


def fetched(status: int = 200, digest: str = "ab" * 32, size: int = 5, message: str = "m1") -> Fetched:
    """The answer to a request for the blob."""
    return Fetched(BOX, message, status, digest, size)


def kinds(*notes: Delivery, is_at_rest: bool = True) -> list[str]:
    """The kinds of what is found."""
    mail = {(BOX, "m1"): Mail(BOX, "m1", "claimed")}
    return [one.kind for one in check_blobs(notes, mail, is_at_rest=is_at_rest)]


def test_a_blob_that_came_whole_is_no_finding() -> None:
    assert kinds(SENT, fetched(), fetched()) == []
    assert kinds(fetched(404, message="another")) == []


def test_a_blob_that_came_with_another_content_is_found() -> None:
    assert kinds(SENT, fetched(digest="cd" * 32)) == [MISBEHAVED]
    assert kinds(SENT, fetched(size=4)) == [MISBEHAVED]


def test_a_refused_blob_of_a_taken_message_is_found() -> None:
    assert kinds(SENT, fetched(410)) == [LOST]


def test_a_blob_that_never_came_is_found_when_all_is_at_rest() -> None:
    assert kinds(SENT) == [LOST]
    assert kinds(SENT, is_at_rest=False) == []
