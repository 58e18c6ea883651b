"""The index of pending jobs: their order, reservations, and what a session holds; looks that are shared."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from types import SimpleNamespace

import msgspec
import pytest

from connectors.hub.services.picking import FreshView, PendingJobs, Picker
from schemas.fold.settled import AppliedChange
from schemas.streams.job.job_registry import REGISTRY_JOBS, JobRow
from trunkline_agent.errors import BackboneUnreachable

pytestmark = pytest.mark.requirement("JE-11")


class Jobs:
    """Rows, and the index that follows them."""

    def __init__(self):
        self.rows: dict[str, JobRow] = {}
        self.index = PendingJobs(self.rows.get)

    def put(self, job_id, at=1, status="pending", session=None, wanted=None):
        self.rows[job_id] = JobRow(
            job_id, status, "d", wanted, session, "http/ann", at, at, None, None, None, 0, None, None, 0
        )
        self.index.changed(AppliedChange(REGISTRY_JOBS, job_id, at, self.rows[job_id]))

    def reserve_all(self, session):
        found = []
        while (job_id := self.index.reserve(session)) is not None:
            found.append(job_id)
        return found


def test_jobs_come_oldest_first_and_by_id_where_equally_old():
    jobs = Jobs()
    for job_id, at in (("c", 2), ("b", 2), ("d", 1), ("a", 3)):
        jobs.put(job_id, at)
    assert jobs.reserve_all("s") == ["d", "b", "c", "a"]


def test_a_job_that_waits_for_a_session_is_for_that_one_alone():
    jobs = Jobs()
    jobs.put("a", 1, wanted="other")
    jobs.put("b", 2, wanted="mine")
    jobs.put("c", 3)
    assert jobs.reserve_all("mine") == ["b", "c"]
    assert jobs.reserve_all("other") == ["a"]


def test_a_reserved_job_is_free_again_when_it_is_released_and_still_waits():
    jobs = Jobs()
    jobs.put("a")
    assert jobs.index.reserve("s") == "a"
    assert jobs.index.reserve("t") is None and jobs.index.is_reserved_for("t")
    jobs.index.release("a")
    assert not jobs.index.is_reserved_for("t")
    assert jobs.index.reserve("t") == "a"
    jobs.put("a", status="running", session="t")
    jobs.index.release("a")
    assert jobs.index.reserve("s") is None


def test_what_is_taken_or_over_is_not_offered_whoever_says_it_still_waits():
    jobs = Jobs()
    jobs.put("a")
    old = jobs.rows["a"]
    jobs.put("a", status="cancelled")
    jobs.index.load([old])
    assert jobs.index.reserve("s") is None


def test_a_session_holds_the_job_that_it_runs_until_that_ends():
    jobs = Jobs()
    jobs.put("a", 1, "running", "s")
    jobs.put("b", 2, "running", "s")
    assert jobs.index.held_by("s").job_id == "a"
    jobs.put("a", 1, "completed", "s")
    jobs.index.load([msgspec.structs.replace(jobs.rows["a"], status="running")])
    assert jobs.index.held_by("s").job_id == "b"
    assert jobs.index.held_by("t") is None


class SlowView:
    """Counts looks at the log's end; each waits until it is let go."""

    def __init__(self):
        self.looks, self.go = 0, [threading.Event(), threading.Event(), threading.Event()]

    def catch_up(self, timeout_s):
        self.looks += 1
        assert self.go[self.looks - 1].wait(timeout_s)


def test_those_who_ask_while_a_look_is_under_way_share_the_next_one():
    view = SlowView()

    async def looks(count):
        async with asyncio.timeout(10):
            while view.looks < count:
                await asyncio.sleep(0.001)

    async def ask():
        fresh = FreshView(view, 5.0)
        first = asyncio.create_task(fresh.catch_up())
        await looks(1)
        others = [asyncio.create_task(fresh.catch_up()) for _ in range(20)]
        await asyncio.sleep(0)
        view.go[0].set()
        await first
        await looks(2)
        # The first look may be older than the other requests.
        assert not any(other.done() for other in others)
        view.go[1].set()
        await asyncio.gather(*others)

    asyncio.run(ask())
    assert view.looks == 2


class AwayView:
    """Finds the log away, but only when it is let go."""

    def __init__(self):
        self.go = threading.Event()

    def catch_up(self, timeout_s):
        assert self.go.wait(5.0)
        raise BackboneUnreachable("away")


@pytest.mark.long
def test_a_look_that_fails_when_its_askers_have_given_up_is_nobodys_error():
    view, complaints = AwayView(), []

    async def ask():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        fresh = FreshView(view, 0.05)
        with pytest.raises(BackboneUnreachable, match="did not say within"):
            await fresh.catch_up()
        view.go.set()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)
        del fresh
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert complaints == []


class SlowLog:
    """Takes picks and settles them after a while, as the log does."""

    def __init__(self, jobs):
        self.jobs, self.appended = jobs, []

    def check(self): ...

    def catch_up(self, timeout_s): ...

    def get(self, row_type, key): ...

    async def settle(self, record):
        body = json.loads(record.value)
        self.appended.append(body["job_id"])
        await asyncio.sleep(0.02)
        self.jobs.put(body["job_id"], status="running", session=body["session"])
        return SimpleNamespace(verdict="accepted")


def test_a_session_that_asks_twice_at_once_gets_one_job_and_two_sessions_get_two():
    async def ask(*sessions):
        jobs = Jobs()
        for number in range(5):
            jobs.put(f"{number:08x}", number)
        log = SlowLog(jobs)
        picker = Picker(log, jobs.index, log, FreshView(log, 5.0), 5.0)
        found = await asyncio.gather(*(picker.pick(session, "ann") for session in sessions))
        return [job_id for job_id, _ in found], log.appended

    first, second = "00000000", "00000001"
    assert asyncio.run(ask("s", "s", "s")) == ([first, first, first], [first])
    assert asyncio.run(ask("s", "t")) == ([first, second], [first, second])


def test_what_is_given_away_elsewhere_leaves_nothing_behind():
    jobs = Jobs()
    jobs.put("stays", 1, wanted="s-1")
    for number in range(5000):
        jobs.put(f"j{number}", 2 + number, wanted=f"s{number}")
        jobs.put(f"j{number}", 2 + number, status="cancelled", wanted=f"s{number}")
    assert len(jobs.index._waiting) < 1100
    assert jobs.reserve_all("s-1") == ["stays"]
