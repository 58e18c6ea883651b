"""Jobs and delegators of the library at a real gateway and, over MQTT, a real broker and bridge."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.keys.sealing import load_keyring
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import BrokerProcess, program_environment, wait_until
from tests.connectors.doors.http_api.hub_access import JOBS
from tests.connectors.doors.mqtt_bridge.agents.mail_run import MailRun
from tests.own_settings import own_settings
from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import EventRejected, NotFound, Refused, UsageError
from trunkline_agent.jobs.async_delegator import AsyncDelegator
from trunkline_agent.jobs.async_job import AsyncJob
from trunkline_agent.jobs.delegator import Delegator
from trunkline_agent.jobs.delegator_plans import JobUpdate, SubmittedJob, WatchTimeout
from trunkline_agent.jobs.job import Job

DOORS = ("http", "mqtt")


class Bench:
    """A gateway, a bridge and a broker, and the library's clients of them."""

    def __init__(self, run: MailRun, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.access = HubAccess(run.gateway.url, run.gateway.operator_token)
        self.delegator = Delegator(Credentials("", self.access))

    def way(self, door: str) -> dict[str, object]:
        """The argument of `Job` for a door."""
        return {"hub": self.access} if door == "http" else {"mqtt": self.run.settings.mqtt}

    def job(self, door: str = "http", submitted: SubmittedJob | None = None) -> Job:
        """A new job, or the submitted one, over a door."""
        found = submitted or self.delegator.submit("build the docs")
        return Job(found.job_id, found.secret, state_dir=self.folder, **self.way(door))  # type: ignore[arg-type]

    def row(self, job_id: str) -> dict[str, object]:
        """The job as the gateway shows it."""
        return dict(self.run.operator.get(f"{JOBS}/{job_id}").json())

    def logged(self, job_id: str) -> list[bytes]:
        """The bytes of the job's events in the log."""
        return [value for stream, _, value in self.run.log("job.event") if stream == f"job/{job_id}"]

    def waiting(self, job_id: str) -> list[bytes]:
        """The bytes in the job's outbox."""
        state = json.loads((self.folder / f"{job_id}.json").read_text())
        return [one["payload"].encode() for one in state["outbox"]]


@pytest.fixture(scope="module")
def bench(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("jobs")
    settings = own_settings(kafka_broker, mosquitto_broker, folder)
    run = MailRun(settings, load_keyring(settings), folder)
    try:
        yield Bench(run, folder / "state")
    finally:
        run.close()


@pytest.mark.requirement("AG-20")
@pytest.mark.parametrize("door", DOORS)
def test_a_job_is_numbered_signed_and_settled_over_each_door(bench: Bench, door: str) -> None:
    with bench.job(door) as job:
        receipts = [
            job.started("begins"),
            job.progress("3 of 10 — größer", {"done": 3, "ratio": 0.1}),
            job.permission_required("publish the report"),
        ]
        assert bench.row(job.job_id)["status"] == "running"
    assert [(one.seq, one.verdict, one.reason) for one in receipts] == [
        (n, "accepted", None) for n in (1, 2, 3)
    ]
    assert all(one.position is not None for one in receipts)
    row = bench.row(job.job_id)
    assert (row["status"], row["events"], row["last_seq"]) == ("completed", 4, 4)


@pytest.mark.requirement("AG-21")
@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (None, "completed", ""),
        (SystemExit(0), "completed", ""),
        (ValueError("in /home/ann/secret"), "error", "ValueError"),
        (SystemExit(3), "error", "SystemExit"),
        (KeyboardInterrupt(), "error", "interrupted"),
    ],
    ids=repr,
)
def test_a_block_ends_its_job_by_its_outcome(
    bench: Bench, error: BaseException | None, status: str, detail: str
) -> None:
    job = bench.job()
    try:
        with job:
            job.started()
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    row = bench.row(job.job_id)
    assert (row["status"], row["last_detail"]) == (status, detail)


@pytest.mark.requirement("AG-21")
def test_a_job_that_was_ended_in_its_block_gets_no_second_end(bench: Bench) -> None:
    with bench.job() as job:
        job.error("the last check is red", {"check": "lint"})
    with pytest.raises(ZeroDivisionError), job:
        raise ZeroDivisionError
    row = bench.row(job.job_id)
    assert (row["status"], row["events"], row["last_detail"]) == ("error", 1, "the last check is red")
    with pytest.raises(UsageError, match="has ended with seq 1"):
        job.progress()


@pytest.mark.requirement("AG-21")
def test_a_block_that_raises_keeps_its_exception_when_the_end_cannot_be_published(bench: Bench) -> None:
    submitted = bench.delegator.submit("x")
    with pytest.raises(ValueError, match="the cause") as caught, bench.job(submitted=submitted):
        assert bench.delegator.cancel(submitted.job_id) == "cancelled"
        raise ValueError("the cause")
    assert any("after_terminal" in note for note in caught.value.__notes__)


@pytest.mark.requirement("AG-20")
@pytest.mark.parametrize("door", DOORS)
def test_a_rejected_event_is_an_error_with_receipt_and_reason(bench: Bench, door: str) -> None:
    submitted = bench.delegator.submit("x")
    forger = SubmittedJob(submitted.job_id, "another secret", submitted.position)
    with pytest.raises(EventRejected) as caught:
        bench.job(door, forger).started()
    assert (caught.value.reason, caught.value.receipt.verdict) == ("bad_signature", "rejected")
    # It is settled, so it is not sent again.
    assert bench.waiting(submitted.job_id) == []


CHILD = """
import os, signal, sys
from trunkline_agent.credentials import HubAccess
from trunkline_agent.jobs.job import Job
from trunkline_agent.broker import Broker
from trunkline_agent.outbox.outbox import JobOutbox

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

door, point, job_id, secret, address, token, prefix, folder = sys.argv[1:]
if door == "http":
    way = {"hub": HubAccess(address, token)}
else:
    way = {"mqtt": Broker(port=int(address), topic_prefix=prefix)}
job = Job(job_id, secret, state_dir=folder, **way)
if point == "outbox_written_not_sent":
    Job._deliver = die
else:
    JobOutbox.confirm = die
job.started("begins")
"""


@pytest.mark.requirement("AG-22")
@pytest.mark.parametrize("point", ["outbox_written_not_sent", "sent_not_confirmed"])
@pytest.mark.parametrize("door", DOORS)
def test_a_job_killed_at_a_point_loses_no_event_and_has_none_twice(bench: Bench, door: str, point: str) -> None:
    submitted = bench.delegator.submit("x")
    mqtt = bench.run.settings.mqtt
    address = bench.access.url if door == "http" else str(mqtt.port)
    arguments = [door, point, submitted.job_id, submitted.secret, address, bench.access.token or ""]
    arguments.append(mqtt.topic_prefix)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments, str(bench.folder)],
        cwd=PROJECT_ROOT,
        env=program_environment(bench.run.settings),
        timeout=60,
    )
    assert child.returncode == -signal.SIGKILL
    waiting = bench.waiting(submitted.job_id)
    assert len(waiting) == 1
    job = bench.job(door, submitted)
    assert [job.resend(), job.resend()] == [1, 0]
    assert job.progress("goes on").seq == 2
    assert set(bench.logged(submitted.job_id)[:-1]) == set(waiting)
    row = bench.row(submitted.job_id)
    assert (row["events"], row["last_seq"]) == (2, 2)


@pytest.mark.requirement("AG-23")
@pytest.mark.parametrize("door", DOORS)
def test_an_async_job_has_the_same_events_and_end(bench: Bench, door: str) -> None:
    submitted = bench.delegator.submit("x")

    async def work() -> list[int | None]:
        way = bench.way(door)
        job = AsyncJob(submitted.job_id, submitted.secret, state_dir=bench.folder, **way)  # type: ignore[arg-type]
        async with job:
            await job.started("begins")
            several = await asyncio.gather(*(job.progress(str(n), {"n": n}) for n in range(3)))
            assert await job.resend() == 0
            await job.permission_required("go on")
        with pytest.raises(UsageError, match="has ended"):
            await job.completed()
        return [one.seq for one in several]

    assert asyncio.run(work()) == [2, 3, 4]
    row = bench.row(submitted.job_id)
    assert (row["status"], row["events"]) == ("completed", 6)


@pytest.mark.requirement("AG-24")
def test_a_delegator_submits_watches_to_the_end_and_sees_each_event(bench: Bench) -> None:
    submitted, again = (
        bench.delegator.submit("build", session="builder", notify=["permission"], key="same") for _ in range(2)
    )
    # Each request has a record of its own, of which the second one changes nothing.
    assert (again.job_id, again.secret) == (submitted.job_id, submitted.secret)
    assert submitted.secret not in repr(submitted)
    row = bench.row(submitted.job_id)
    assert (row["session_wanted"], row["notify"], row["description"]) == ("builder", ["permission"], "build")

    def work() -> None:
        with bench.job(submitted=submitted) as job:
            job.started("begins")
            job.progress("half", {"done": 5})

    updates = bench.delegator.watch(submitted.job_id, idle_timeout_s=30, total_timeout_s=60)
    worker = threading.Timer(1.0, work)
    worker.start()
    found = list(updates)
    worker.join()
    assert [(one.event, one.status, one.detail, one.data, one.seq) for one in found] == [
        ("started", "running", "begins", {}, 1),
        ("progress", "running", "half", {"done": 5}, 2),
        ("completed", "completed", "", {}, 3),
    ]
    assert [one.is_end for one in found] == [False, False, True]
    assert all(one.logged_at for one in found)
    # The end alone, when it comes before the watch.
    (end,) = bench.delegator.watch(submitted.job_id)
    assert (end.status, end.is_end) == ("completed", True)


@pytest.mark.requirement("AG-24")
def test_a_cancellation_is_the_end_of_a_watch(bench: Bench) -> None:
    submitted = bench.delegator.submit("x")

    async def watched() -> list[JobUpdate]:
        delegator = AsyncDelegator(bench.access)
        found = []
        async for update in delegator.watch(submitted.job_id, total_timeout_s=30):
            found.append(update)
            if update.event == "started":
                assert await delegator.cancel(submitted.job_id, "not needed", key="c1") == "cancelled"
        assert await delegator.cancel(submitted.job_id, "not needed", key="c1") == "cancelled"
        with pytest.raises(Refused):
            await delegator.cancel(submitted.job_id)
        return found

    worker = threading.Timer(1.0, lambda: bench.job(submitted=submitted).started())
    worker.start()
    found = asyncio.run(watched())
    worker.join()
    assert [one.status for one in found] == ["running", "cancelled"]


@pytest.mark.requirement("AG-25")
def test_each_timer_ends_a_watch_and_the_job_goes_on(bench: Bench) -> None:
    submitted = bench.delegator.submit("x")
    begun = time.monotonic()
    with pytest.raises(WatchTimeout) as total:
        list(bench.delegator.watch(submitted.job_id, total_timeout_s=0.4, idle_timeout_s=9))
    with pytest.raises(WatchTimeout) as idle:
        list(bench.delegator.watch(submitted.job_id, total_timeout_s=9, idle_timeout_s=0.4))

    async def watched() -> None:
        async for _ in AsyncDelegator(bench.access).watch(submitted.job_id, idle_timeout_s=0.4):
            pass

    with pytest.raises(WatchTimeout) as third:
        asyncio.run(watched())
    assert [one.value.timer for one in (total, idle, third)] == ["total", "idle", "idle"]
    assert total.value.exit_code == 2
    assert time.monotonic() - begun < 8
    assert bench.row(submitted.job_id)["status"] == "pending"
    with pytest.raises(NotFound):
        next(iter(bench.delegator.watch("00000000")))
    with pytest.raises(Refused):
        next(iter(Delegator(HubAccess(bench.access.url, "no-such-token" * 3)).watch(submitted.job_id)))


@pytest.mark.requirement("AG-24")
def test_a_watch_that_is_ended_early_leaves_no_connection(bench: Bench) -> None:
    submitted = bench.delegator.submit("x")
    with bench.job(submitted=submitted) as job:
        worker = threading.Timer(1.0, job.started)
        worker.start()
        for update in bench.delegator.watch(submitted.job_id, total_timeout_s=30):
            assert update.event == "started"
            break
        worker.join()
    wait_until(
        lambda: "job-watch" not in {one.name for one in threading.enumerate()}, 5, "the reader has ended"
    )


@pytest.mark.requirement("AG-26")
def test_a_job_of_the_environment_finds_the_hub(bench: Bench, tmp_path: Path) -> None:
    submitted = bench.delegator.submit("x")
    file = tmp_path / "worker.json"
    Credentials("worker", bench.access).save(file)
    variables = {
        "TRUNKLINE_JOB_ID": submitted.job_id,
        "TRUNKLINE_JOB_SECRET": submitted.secret,
        "TRUNKLINE_STATE_DIR": str(tmp_path / "state"),
        "TRUNKLINE_CREDENTIALS": str(file),
    }
    with Job.from_environment(variables) as job:
        assert job.started().verdict == "accepted"
    assert (tmp_path / "state" / f"{submitted.job_id}.json").exists()
    assert bench.row(submitted.job_id)["status"] == "completed"
