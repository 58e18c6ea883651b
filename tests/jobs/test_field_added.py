"""A field is added to the wire model under load: old and new senders, of the same jobs, side by side."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs import settle_events
from jobs.build_views import catch_up
from jobs.refold import check_views
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import REGISTRY_JOBS, JobEvent
from schemas.tables.ledger import LEDGER
from tests.broker_processes import wait_until
from tests.jobs.conftest import Rows, ledger_rows
from tests.jobs.topic_load import SECRET, append_all, registration
from tests.mqtt_wire import publish_all
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import ACCEPTED

JOBS = [f"{number:08x}" for number in range(10)]
# Rounds of events, one of each job: of the old sender before the new one begins; of the new one; of the old one
# at most (a job remembers 256 seqs); and how many each may be before the ledger.
BEFORE, NEW_ROUNDS, OLD_ROUNDS, AHEAD = 8, 18, 100, 6
LIMIT_S = 90


class NewerJobEvent(JobEvent):
    """The wire model of a later version."""

    cost_eur: float
    model: dict[str, str]


# The first seq of each version: one sends the odd seqs of a job, the other the even ones.
FIRST_SEQ: dict[type[JobEvent], int] = {JobEvent: 1, NewerJobEvent: 2}


def sent_by(version: type[JobEvent], seq: int) -> Iterator[tuple[str, bytes]]:
    """Return the events of all jobs under one seq by a sender with this wire model: topic and bytes."""
    added: dict[str, Any] = {"cost_eur": 0.25, "model": {"name": "small"}} if version is NewerJobEvent else {}
    for job in JOBS:
        event = version(
            schema_version=1,
            seq=seq,
            job_id=job,
            event="progress",
            timestamp="2026-11-21T10:00:00Z",
            detail="going on",
            data={},
            **added,
        )
        yield f"{job}/events", canonical(sign_event(event.model_dump(), SECRET))


class Load:
    """Senders of both versions, who go on as the ledger does: none is ever more than AHEAD rounds before it."""

    def __init__(self, settings: Settings) -> None:
        self._mqtt = settings.mqtt
        self._ledger = DeltaTable(settings.table_path(LEDGER))
        self._version = -1
        self._settled: dict[bool, int] = {True: 0, False: 0}  # events by whether their seq is odd
        self.sent: dict[type[JobEvent], list[bytes]] = {JobEvent: [], NewerJobEvent: []}
        self.is_over = threading.Event()

    def send(self, version: type[JobEvent], rounds: int) -> None:
        """Publish so many rounds, one event of each job in each, or fewer when the load is over."""
        for number in range(rounds):
            room = functools.partial(self._has_room, version, number)
            wait_until(room, LIMIT_S, f"the ledger has what was sent before round {number}")
            if self.is_over.is_set():
                return
            some = list(sent_by(version, 2 * number + FIRST_SEQ[version]))
            publish_all(self._mqtt, some)
            self.sent[version] += [value for _, value in some]

    def look(self) -> None:
        """Count what the ledger has; all of it is accepted."""
        self._ledger.update_incremental()
        if self._ledger.version() == self._version:
            return
        self._version = self._ledger.version()
        rows = self._ledger.to_pyarrow_table(columns=["type", "seq", "verdict", "why"]).to_pylist()
        found = [row for row in rows if row["type"] == "job.event"]
        assert [row for row in found if row["verdict"] != ACCEPTED] == []
        odd = [row["seq"] % 2 == 1 for row in found]
        self._settled = {True: odd.count(True), False: odd.count(False)}

    def settled(self, version: type[JobEvent]) -> int:
        """How many events of this version the ledger had at the last look."""
        return self._settled[FIRST_SEQ[version] % 2 == 1]

    def _has_room(self, version: type[JobEvent], number: int) -> bool:
        return self.is_over.is_set() or self.settled(version) >= (number - AHEAD) * len(JOBS)


def shared_batches(events: Rows) -> int:
    """How often a micro-batch of one job had events of both versions."""
    found = 0
    for job in JOBS:
        odd: set[bool] = set()
        for row in events:
            if row["stream_id"] == job:
                odd.add(row["seq"] % 2 == 1)
                if row["accepted_offset"] is not None:  # the job's last row of its micro-batch
                    found += len(odd) == 2
                    odd = set()
    return found


@pytest.mark.requirement("JE-02")
@pytest.mark.timeout(240)
def test_old_and_new_senders_of_the_same_jobs_are_accepted_and_what_is_new_is_kept(
    start_bridge: Callable[..., Any], spark: SparkSession, backbone_settings: Settings, keyring: Keyring
) -> None:
    start_bridge()
    append_all(backbone_settings, [registration(job, keyring) for job in JOBS])
    query = settle_events.start(spark, backbone_settings)
    load, sending = Load(backbone_settings), list[Future[None]]()

    def is_settled(version: type[JobEvent], count: int) -> bool:
        assert query.isActive, query.exception()
        for one in sending:
            if one.done():
                one.result()
        load.look()
        return load.settled(version) >= count

    def wait_settled(version: type[JobEvent], count: int) -> None:
        what = f"{count} events of {version.__name__} in the ledger"
        wait_until(functools.partial(is_settled, version, count), LIMIT_S, what)

    with ThreadPoolExecutor(2) as pool:
        try:
            sending.append(pool.submit(load.send, JobEvent, OLD_ROUNDS))
            wait_settled(JobEvent, BEFORE * len(JOBS))
            # The field is added while the others go on, and they go on until all that has it is settled.
            sending.append(pool.submit(load.send, NewerJobEvent, NEW_ROUNDS))
            wait_settled(NewerJobEvent, NEW_ROUNDS * len(JOBS))
            load.is_over.set()
            sending[0].result(LIMIT_S)
            wait_settled(JobEvent, len(load.sent[JobEvent]))
        finally:
            load.is_over.set()
            query.stop()
    old, new = load.sent[JobEvent], load.sent[NewerJobEvent]
    assert len(new) == NEW_ROUNDS * len(JOBS) and len(old) > (BEFORE + NEW_ROUNDS // 2) * len(JOBS)
    events = [row for row in ledger_rows(backbone_settings) if row["type"] == "job.event"]
    assert shared_batches(events) > len(JOBS)
    assert {row["verdict"] for row in events} == {ACCEPTED}
    assert sorted(row["value"] for row in events) == sorted(old + new)
    newer = [json.loads(row["value"]) for row in events if row["seq"] % 2 == 0]
    assert {event["cost_eur"] for event in newer} == {0.25}
    catch_up(backbone_settings)
    jobs = DeltaTable(backbone_settings.table_path(REGISTRY_JOBS)).to_pyarrow_table().to_pylist()
    last_seq = max(row["seq"] for row in events)
    assert {(row["job_id"], row["last_seq"]) for row in jobs} == {(job, last_seq) for job in JOBS}
    check = check_views(backbone_settings, DeltaTable(backbone_settings.table_path(LEDGER)), keyring)
    assert (check.differences, check.newer) == ([], 0)
