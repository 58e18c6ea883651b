"""Mailboxes in the local state: the ids of a week are kept apart from what waits, and found again."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from deltalake import DeltaTable

from jobs import build_views
from jobs.refold import check_views
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim
from schemas.streams.mailboxes.message import MAILBOX_VIEW, Message
from schemas.tables.ledger import LEDGER
from schemas.wire.record import OutgoingRecord
from tests.jobs.conftest import Rows
from tests.jobs.topic_load import append_all

COUNT = 300


def posts(numbers: range, body: str = "{}") -> Iterator[OutgoingRecord]:
    """A message to `builder` for each number."""
    for number in numbers:
        message = Message.model_validate(
            {"message_id": f"m{number}", "from": "ann", "to": "builder", "kind": "ask", "body": body}
        )
        yield message.record(door="http", principal="ann")


def claim(request_id: str, limit: int) -> OutgoingRecord:
    return MailboxClaim(to="builder", request_id=request_id, limit=limit).record(
        door="http", principal="builder"
    )


def verdicts(rows: Rows, since: int) -> Counter[tuple[str, str | None]]:
    """Count the verdicts and reasons of the mailbox's rows after the first `since`."""
    of_mailbox = [row for row in rows if row["stream_kind"] == "mailbox"]
    return Counter((row["verdict"], row["reason"]) for row in of_mailbox[since:])


@pytest.mark.requirement("HH-06")
@pytest.mark.parametrize(
    "lost",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["a second start", "lost state"],
)
def test_ids_are_known_again_after(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring, lost: bool
) -> None:
    append_all(backbone_settings, [*posts(range(COUNT)), claim("q1", COUNT // 2)])
    assert verdicts(drain(), 0) == {("accepted", None): COUNT + 1}
    if lost:
        build_views.catch_up(backbone_settings)
        shutil.rmtree(backbone_settings.state_path)
    again = [*posts(range(COUNT)), *posts(range(5), "[1]"), claim("q1", COUNT // 2), claim("q2", COUNT)]
    append_all(backbone_settings, [*again, *posts(range(COUNT, COUNT + 7))])
    expected = {("duplicate", None): COUNT + 1, ("rejected", "seq_conflict"): 5, ("accepted", None): 8}
    assert verdicts(drain(), COUNT + 1) == expected
    build_views.catch_up(backbone_settings)
    mailbox = DeltaTable(backbone_settings.table_path(MAILBOX_VIEW)).to_pyarrow_table()
    assert Counter(mailbox["status"].to_pylist()) == {"claimed": COUNT, "unread": 7}
    found = check_views(backbone_settings, DeltaTable(backbone_settings.table_path(LEDGER)), keyring)
    assert (found.differences, found.newer) == ([], 0)
