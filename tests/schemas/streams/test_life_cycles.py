"""The declared life cycles decide: a changed table changes the answer of the fold."""

from __future__ import annotations

from itertools import pairwise

import pytest

from schemas.fold.entries import Entries
from schemas.streams.container.containers import CONTAINER_TRANSITIONS
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import JOB_TRANSITIONS
from schemas.streams.principal.principals import PRINCIPAL_TRANSITIONS
from schemas.streams.schedule.schedule_registry import SCHEDULE_TRANSITIONS
from schemas.streams.session.sessions import SESSION_TRANSITIONS
from schemas.streams.task.task_registry import TASK_TRANSITIONS
from schemas.streams.webhook.webhooks import WEBHOOK_TRANSITIONS
from tests.schemas.job_records import KEYRING
from tests.schemas.stream_records import GOOD, good_record, known_stream


@pytest.mark.requirement("HO-03")
@pytest.mark.parametrize(
    ("transitions", "state", "record_type", "changed"),
    [
        (JOB_TRANSITIONS, "pending", "job.event", ("rejected", "after_terminal")),
        (JOB_TRANSITIONS, "pending", "job.picked", ("rejected", "after_terminal")),
        (JOB_TRANSITIONS, "pending", "job.cancelled", ("rejected", "after_terminal")),
        (SESSION_TRANSITIONS, "running", "session.stopped", ("rejected", "after_terminal")),
        (TASK_TRANSITIONS, "running", "task.completed", ("rejected", "after_terminal")),
        (PRINCIPAL_TRANSITIONS, "active", "principal.revoked", ("duplicate", None)),
        (SCHEDULE_TRANSITIONS, "active", "schedule.removed", ("rejected", "after_terminal")),
        (WEBHOOK_TRANSITIONS, "active", "webhook.removed", ("rejected", "after_terminal")),
    ],
)
def test_a_transition_that_the_table_lacks_is_not_made(monkeypatch, transitions, state, record_type, changed):
    key, _ = GOOD[record_type]
    record = good_record(record_type, ce_id="second")
    assert settle(record, known_stream(key), KEYRING, Entries()).verdict == "accepted"
    past = known_stream(key)
    monkeypatch.setitem(transitions, state, frozenset())
    settled = settle(record, past, KEYRING, Entries())
    assert (settled.verdict, settled.reason) == changed


@pytest.mark.requirement("HO-03")
def test_the_container_table_has_no_way_around_a_state() -> None:
    states = list(CONTAINER_TRANSITIONS)
    assert all(after in CONTAINER_TRANSITIONS[state] for state, after in pairwise(states))
