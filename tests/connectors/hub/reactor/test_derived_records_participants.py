"""Derived records for a spawned agent when its task ends (AM-06), without Kafka."""

from __future__ import annotations

import pytest

from schemas.effects.job_effects import stopped_with_task
from schemas.fold.settled import Settled
from schemas.streams.agents.agent_registry import AGENT_STOPPED, AgentJoined, ParticipantRow
from schemas.streams.task.task_registry import (
    TaskCancellation,
    TaskCompletion,
    TaskFailure,
    TaskStart,
)
from schemas.wire.record import OutgoingRecord, Record
from tests.connectors.hub.reactor.followed import follows
from tests.connectors.hub.reactor.test_derived_records_hub import Folded
from tests.schemas.hub_records import public_key
from tests.schemas.job_records import said

pytestmark = pytest.mark.requirement("AM-06")

BY = {"door": "http", "principal": "operator"}
ENDS = {
    "completed": TaskCompletion(task_id="t1", request_id="e", result="7"),
    "failed": TaskFailure(task_id="t1", request_id="e", error="x" * 1000),
    "cancelled": TaskCancellation(task_id="t1", request_id="e", reason="enough"),
}


def started(task_id: str = "t1", image: str | None = "trunkline/mcp-agent") -> OutgoingRecord:
    body = TaskStart(
        task_id=task_id,
        request_id=task_id,
        description="count",
        agent_name="ann",
        capabilities=["count"],
        token_sha256="ab" * 32,
        expiry_ms=1000,
        image=image,
    )
    return body.record(**BY)


def joined(task_id: str | None = "t1", request_id: str = "j") -> OutgoingRecord:
    body = AgentJoined(
        agent_name="ann",
        request_id=request_id,
        task="count",
        capabilities=[],
        public_key=public_key(),
        task_id=task_id,
    )
    return body.record(**BY)


def participant(log: Folded) -> ParticipantRow:
    row = log.get(ParticipantRow, "ann")
    assert isinstance(row, ParticipantRow)
    return row


def ended(log: Folded, how: str) -> tuple[Settled, Record]:
    return log.add(ENDS[how].record(**BY))


@pytest.mark.parametrize("how", ENDS)
def test_a_spawned_agent_stops_with_its_task_once(how: str) -> None:
    log = Folded()
    for made in (started(), joined()):
        assert said(log.add(made)[0]) == ("accepted", None)
    _, end = ended(log, how)
    (stop,) = follows(end, log.get)
    assert (stop.type, stop.door, stop.principal) == (AGENT_STOPPED, "reactor", "reactor")
    # The task keeper says the same in the same words: whoever is second is a duplicate.
    assert stopped_with_task(log.task("t1"), participant(log)) == stop
    assert said(log.add(stop)[0]) == ("accepted", None)
    assert said(log.add(stop)[0]) == ("duplicate", None)
    assert participant(log).status == "stopped"
    assert (participant(log).stopped_why or "").startswith(f"its task is {how}")
    assert follows(end, log.get) == []


def test_nothing_stops_that_has_another_task_or_none_or_joined_again() -> None:
    for other in ("t2", None):
        log = Folded()
        log.add(started())
        log.add(joined(other))
        assert follows(ended(log, "failed")[1], log.get) == []
    log = Folded()
    log.add(started())
    _, end = ended(log, "failed")
    assert follows(end, log.get) == []
    log.add(joined("t9", "again"))
    assert follows(end, log.get) == []


def test_only_the_record_that_ended_the_task_has_a_derived_record() -> None:
    log = Folded()
    log.add(started())
    log.add(joined())
    ended(log, "completed")
    settled, late = ended(log, "failed")
    assert settled.verdict == "rejected"
    assert follows(late, log.get) == []
