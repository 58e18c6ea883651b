"""Many pickers, two gateways, kills: each job goes to one session, and the winner can sign for it."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from connectors.log.kafka_libraries import to_record
from connectors.log.publisher import Publisher
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import macs_stream
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import JOB_EVENT, JOB_PICKED
from schemas.wire.record import OutgoingRecord, Record
from tests.broker_processes import wait_until
from tests.faults.killed_gateways import Asking, Gateways
from tests.raw_records import read_to_end
from tests.registered_jobs import register_job
from tests.schemas.job_records import signed
from trunkline_agent.wire.strict_json import canonical

PICKERS = 16
PATIENCE_S = 120.0


class Pace:
    """How many jobs are won, and how many may be before the next kill is over."""

    def __init__(self) -> None:
        self.won = 0
        self.limit = 0
        self._changed = threading.Condition()

    def allow(self, limit: int) -> None:
        """Let the pickers go on up to this number of jobs."""
        with self._changed:
            self.limit = limit
            self._changed.notify_all()

    def wait_allowed(self) -> None:
        """Wait, as a picker, while as many are won as may be."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.won < self.limit, PATIENCE_S), "the kill is not over"

    def add(self) -> None:
        """One more is won."""
        with self._changed:
            self.won += 1
            self._changed.notify_all()

    def wait_won(self, count: int) -> int:
        """Wait until so many are won; returns how many it are."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.won >= count, PATIENCE_S), f"{self.won} of {count} won"
            return self.won


class Picker(threading.Thread):
    """Picks for one new session after another, at any gateway, until there is no job left."""

    def __init__(self, number: int, gateways: Gateways, pace: Pace) -> None:
        super().__init__(daemon=True)
        self._number = number
        self._gateways = gateways
        self._pace = pace
        self._choice = random.Random(number)  # the same choices in each run
        self.won: dict[str, dict[str, Any]] = {}
        self.asking = Asking()
        self.cut = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Pick until told that nothing fits."""
        try:
            with httpx.Client(headers={"Authorization": f"Bearer {self._gateways.token}"}) as client:
                for turn in range(10_000):
                    self._pace.wait_allowed()
                    session = f"picker-{self._number}-{turn}"
                    grant = self._pick(client, session)
                    if grant is None:
                        return
                    self.won[session] = grant
                    self._pace.add()
        except BaseException as error:  # told to the test, which would not see it in a thread
            self.failure = error

    def _pick(self, client: httpx.Client, session: str) -> dict[str, Any] | None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            url = self._choice.choice(self._gateways.settings).gateway_url
            try:
                with self.asking.of(url):
                    answer = client.post(f"{url}/api/hub/jobs/pick", json={"session": session}, timeout=15)
            except httpx.TransportError:
                answer = None
                self.cut += 1
            if answer is not None and answer.status_code == 200:
                return dict(answer.json())
            if answer is not None and answer.status_code == 404:
                assert answer.json()["reason"] == "no_match", answer.text
                return None
            if time.monotonic() > deadline:
                pytest.fail(f"no answer to a pick in {PATIENCE_S} s: {answer and answer.text}")
            time.sleep(0.05)


def folded(settings: Settings, keyring: Keyring) -> Iterator[tuple[Record, str]]:
    """Each record of the log with its verdict."""
    entries: dict[bytes | None, Entries] = {}
    for record in map(to_record, read_to_end(settings.kafka)):
        macs = entries.setdefault(macs_stream(record.partition).encode(), Entries())
        settled = settle(record, entries.setdefault(record.key, Entries()), keyring, macs)
        yield record, settled.verdict


def started_event(job_id: str, secret: str) -> OutgoingRecord:
    """The first event of a job, signed by its winner."""
    value = canonical(signed(1, "started", secret, job_id=job_id, detail="mine"))
    return OutgoingRecord(f"job/{job_id}", f"start-{job_id}", "mqtt", "unverified", JOB_EVENT, value)


def run_pickers(settings: Settings, keyring: Keyring, tmp_path: Path, jobs: int, kills: int) -> None:
    """The jobs, the pickers, the kills, and what must hold afterwards."""
    with Publisher(settings) as publisher:
        registered = {register_job(publisher, keyring, "pick me").job_id for _ in range(jobs)}
    gateways, pace = Gateways(settings, tmp_path), Pace()
    try:
        pickers = [Picker(number, gateways, pace) for number in range(PICKERS)]
        for picker in pickers:
            picker.start()
        # Two kills come when a quarter and the half of the jobs are won. Meanwhile the pickers stop before the
        # next one, or on a quick machine no job would be left for it.
        step = jobs // (kills + 2)
        for number in range(kills):
            at = step * (number + 1)
            pace.allow(at + step - PICKERS)
            assert pace.wait_won(at) < jobs, "no job was open any more when the gateway was killed"
            held = gateways.hold(number % 2)
            # Now those who have waited ask, too.
            pace.allow(at + step)
            wait_until(lambda held=held: any(p.asking.is_sent(held) for p in pickers), what="a pick to be cut")
            gateways.kill(number % 2)
        pace.allow(jobs + PICKERS)
        for picker in pickers:
            picker.join(PATIENCE_S)
    finally:
        gateways.stop()
    assert [picker.failure for picker in pickers if picker.failure] == []
    assert sum(picker.cut for picker in pickers) >= kills, "nobody was asking a gateway that was killed"
    won = {session: grant for picker in pickers for session, grant in picker.won.items()}
    assert Counter(grant["job_id"] for grant in won.values()) == Counter(registered), "not each job once"
    with Publisher(settings) as publisher:
        waiting = [publisher.append(started_event(g["job_id"], g["secret"])) for g in won.values()]
        for append in waiting:
            append.result(30)
    accepted = [record for record, verdict in folded(settings, keyring) if verdict == "accepted"]
    picks = [orjson.loads(r.value) for r in accepted if r.value and JOB_PICKED.encode() in r.header_values]
    assert {pick["job_id"]: pick["session"] for pick in picks} == {
        grant["job_id"]: session for session, grant in won.items()
    }
    assert len(picks) == jobs, "a job was picked twice"
    starts = [r for r in accepted if JOB_EVENT.encode() in r.header_values]
    assert len(starts) == jobs, "a winner holds a secret that does not verify"


@pytest.mark.requirement("JE-11")
@pytest.mark.timeout(300)
def test_each_job_goes_to_one_of_many_pickers_though_gateways_are_killed(
    backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    run_pickers(backbone_settings, keyring, tmp_path, jobs=100, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixteen_pickers_share_five_hundred_jobs_at_two_gateways_that_are_killed(
    backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    run_pickers(backbone_settings, keyring, tmp_path, jobs=500, kills=10)
