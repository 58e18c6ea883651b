"""A record late in a stream's life costs as many bytes as an early one, with the state that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from schemas.fold.entries import Entries
from schemas.keys.sealing import job_secret_purpose
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import JobRegistration
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import Record
from tests.schemas.job_records import JOB_ID, KEYRING, SECRET, make_record, signed, written
from tests.schemas.stream_records import as_read, message

WINDOW: Final = 100
LATE: Final = 10_000
BY: Final[dict[str, Any]] = {"door": "http", "principal": "bo"}


def events() -> Iterator[list[Record]]:
    """The events of a job, each alone."""
    yield [
        as_read(
            JobRegistration(
                sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
                job_id=JOB_ID,
                description="",
            ).record(door="cli", principal="operator")
        )
    ]
    for seq in range(1, LATE):
        yield [make_record(written(signed(seq)))]


def drains() -> Iterator[list[Record]]:
    """A message and the drain that takes it, again and again."""
    for number in range(LATE):
        posted = Message.model_validate(message(f"m{number}"))
        claimed = MailboxClaim(to="bo", request_id=f"drain-{number}", limit=1).record(**BY)
        yield [as_read(posted.record(**BY)), as_read(claimed)]


@pytest.mark.long
@pytest.mark.requirement("ST-10")
@pytest.mark.parametrize("life", [events, drains])
def test_the_ten_thousandth_step_takes_as_many_bytes_as_the_two_hundredth(life: Any) -> None:
    entries, macs, sizes = Entries(), Entries(), []
    for step in life():
        for record in step:
            assert settle(record, entries, KEYRING, macs).verdict == "accepted"
        writes = entries.take_writes()
        parts = [part for record in step for part in (record.value or b"", *record.header_values)]
        parts += [part for key, value in writes.items() for part in (key.encode(), value or b"")]
        sizes.append(sum(map(len, parts)))
    assert len(sizes) == LATE
    # The first ones write less, because there is nothing yet to remember.
    assert sum(sizes[-WINDOW:]) <= 1.2 * sum(sizes[WINDOW : 2 * WINDOW])
