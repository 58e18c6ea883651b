"""Agents that publish under load, and an oracle outside the system that notes what was receipted."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from connectors.log.publisher import Publisher
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from tests.registered_jobs import RegisteredJob, register_job
from trunkline_agent.broker import job_broker
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.jobs.job import Job
from trunkline_agent.mqtt.mqtt_client import wait_for_login

PATIENCE_S = 240.0
ACCOUNT_S = 60.0


class Oracle:
    """A file of `[job, seq]`, a line for each event whose publisher got a receipt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def note(self, job_id: str, seq: int) -> None:
        """The event has its receipt."""
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps([job_id, seq]) + "\n")

    def receipted(self) -> set[tuple[str, int]]:
        """All that was noted."""
        if not self._path.exists():
            return set()
        return {(job, seq) for job, seq in map(json.loads, self._path.read_text().splitlines())}


def register_jobs(settings: Settings, keyring: Keyring, count: int) -> list[RegisteredJob]:
    """Register jobs while all is well, and wait until each has its account at the MQTT broker."""
    with Publisher(settings) as publisher:
        jobs = [register_job(publisher, keyring, "be there after the kills") for _ in range(count)]
    for job in jobs:
        wait_for_login(job_broker(settings.mqtt, job.job_id, job.secret), ACCOUNT_S)
    return jobs


class Agent(threading.Thread):
    """Publishes its jobs, one after another, each with `events` events; sends again until receipted."""

    def __init__(
        self, settings: Settings, jobs: list[RegisteredJob], events: int, oracle: Oracle, state_dir: Path
    ) -> None:
        super().__init__(daemon=True)
        self._settings = settings
        self._jobs = jobs
        self._events = events
        self._oracle = oracle
        self._state_dir = state_dir
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Work until the jobs are done or patience ends."""
        try:
            deadline = time.monotonic() + PATIENCE_S
            for job in self._jobs:
                publisher = Job(job.job_id, job.secret, mqtt=self._settings.mqtt, state_dir=self._state_dir)
                for seq in range(1, self._events + 1):
                    self._publish(publisher, seq, deadline)
                    self._oracle.note(job.job_id, seq)
        except BaseException as error:  # told to the test, which would not see it in a thread
            self.failure = error

    def _publish(self, publisher: Job, seq: int, deadline: float) -> None:
        kind = "started" if seq == 1 else "completed" if seq == self._events else "progress"
        entered = False
        while True:
            try:
                if entered:
                    publisher.resend()
                else:
                    entered = True
                    publisher.publish(kind, f"step {seq}")
            except BackboneUnreachable:
                if time.monotonic() > deadline:
                    raise
            else:
                return
