"""The limit of jobs without an end, on a hub whose log is only in memory (LM-04)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from connectors.hub.engine.operation import Asked
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.principal_limits import LiveJobs
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.policy import Caller
from connectors.operations.work.registration import JobRequest, register
from schemas.streams.job.job_registry import JobCancellation, JobRow
from schemas.wire.record import OutgoingRecord
from tests.connectors.doors.mcp_tools.folded_hub import KEYRING, FoldedHub

pytestmark = pytest.mark.requirement("LM-04")
WANTED = JobRequest(description="build it")


class SlowHub(FoldedHub):
    """A hub that settles each record a little after it was appended, as Kafka does."""

    keyring = KEYRING

    async def settle(self, outgoing: OutgoingRecord) -> SettledRecord:
        """As of the appender."""
        await asyncio.sleep(0)
        return self.add(outgoing)


def write(principal: str, key: str | None = None) -> Asked:
    """A request to register a job, with an idempotency key if it is to be repeated."""
    return Asked(Caller(principal, "delegator"), None, None, key, lambda: False, {})


async def registered(hub: SlowHub, *writes: Asked) -> list[Any]:
    """Register jobs at once; for each its id, or the error."""
    any_hub: Any = hub
    found = await asyncio.gather(*(register(any_hub, one, WANTED) for one in writes), return_exceptions=True)
    return [one[0] if isinstance(one, tuple) else one for one in found]


def test_a_principal_has_as_many_live_jobs_as_its_limit_and_the_end_of_one_makes_room() -> None:
    hub = SlowHub()
    hub.limit("dee", live_jobs_most=3)
    found = asyncio.run(registered(hub, *(write("dee") for _ in range(8))))
    ids = [one for one in found if isinstance(one, str)]
    errors = [one for one in found if isinstance(one, ApiError)]
    assert (len(ids), len(errors)) == (3, 5), found
    assert {(one.status_code, one.reason) for one in errors} == {(429, "limit_reached")}
    assert all(int((one.headers or {})["Retry-After"]) >= 1 for one in errors)
    assert hub.refused[0][::2] == ("limit_reached", "dee")
    assert isinstance(asyncio.run(registered(hub, write("eve")))[0], str), "others have limits of their own"
    hub.add(JobCancellation(job_id=ids[0], request_id="r").record(door="cli", principal="operator"))
    again = asyncio.run(registered(hub, write("dee"), write("dee")))
    assert [isinstance(one, str) for one in again] == [True, False]


def test_a_repeated_registration_is_the_same_job_when_the_limit_is_reached() -> None:
    hub = SlowHub()
    hub.limit("dee", live_jobs_most=1)
    (first,) = asyncio.run(registered(hub, write("dee", "key")))
    (again,) = asyncio.run(registered(hub, write("dee", "key")))
    assert first == again == write("dee", "key").made.hex[:8]
    assert len(hub.live(JobRow)) == 1


def test_the_index_counts_jobs_of_all_doors_and_forgets_those_that_have_ended() -> None:
    hub = SlowHub()
    (job,) = asyncio.run(registered(hub, write("dee")))
    row = hub.get(JobRow, job)
    assert row is not None
    jobs = LiveJobs()
    jobs.load([row])
    assert (jobs.count("dee"), jobs.count("eve")) == (1, 0)
    assert hub.live_jobs.count("dee") == 1
    hub.add(JobCancellation(job_id=job, request_id="r").record(door="cli", principal="operator"))
    assert hub.live_jobs.count("dee") == 0
