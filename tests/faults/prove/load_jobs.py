"""Jobs: registered and cancelled by HTTP, their events published over MQTT in all the ways clients have."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from schemas.settings.settings import Settings
from tests.faults.prove.hub_client import Clock, GaveUp, HubClient, shown
from tests.faults.prove.oracle import ASKED, ENDED, FORGED, Note, Oracle, content_hash
from tests.faults.prove.schedule import DUPLICATES, FORGE, REORDER, SKEW, Schedule
from tests.faults.prove.seed_parts import IDLE
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.plans import Answer
from trunkline_agent.jobs.job import Job
from trunkline_agent.mqtt.event_delivery import deliver
from trunkline_agent.outbox.outbox import PendingEvent
from trunkline_agent.wire.receipt import Receipt
from trunkline_agent.wire.signing import sign_event

BOSS: Final = "boss"
JOBS, TASKS = "/api/hub/jobs", "/api/hub/tasks"
_EVENTS: Final = 5


class JobLoad:
    """One client: registers jobs as `boss`, and works on them. `number` tells clients apart."""

    def __init__(
        self, settings: Settings, schedule: Schedule, boss: HubClient, oracle: Oracle, clock: Clock, number: int
    ) -> None:
        self._settings, self._schedule, self._boss = settings, schedule, boss
        self._oracle, self._clock, self._number = oracle, clock, number
        self._draw = random.Random(f"jobs/{schedule.seed}/{number}")
        self._state_dir: Path = settings.data_path.parent / f"publisher-{number}"
        self._skew_s = schedule.skew_s[number % len(schedule.skew_s)]
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        """Register and work, one job after the other."""
        while self._clock.may_begin():
            job_id, secret = self._registered()
            roll = self._draw.random()
            if roll < 0.15:
                self._cancel(job_id)
            elif roll < 0.5:
                self._published(job_id, secret)
            else:
                self._by_hand(job_id, secret)
            time.sleep(0.3)

    def _registered(self) -> tuple[str, str]:
        key = f"job-{self._number}-{self._draw.getrandbits(60):x}"
        answer = self._boss.ask(
            "POST",
            JOBS,
            key=key,
            duplicates=self._schedule.duplicates,
            says=lambda answer: _parts(answer, "job_id", "secret"),
            json={"description": key},
        )
        told, said = _told(answer, 201), content_hash(key)
        self._oracle.acked("http", f"job/{told['job_id']}", "registered", BOSS, said, ordered=False)
        return told["job_id"], told["secret"]

    def _cancel(self, job_id: str) -> None:
        path = f"{JOBS}/{job_id}/cancel"
        _told(self._boss.ask_known("POST", path, json={"reason": "no longer needed"}), 200)
        self._ended(job_id, "cancelled", "http")

    def _ended(self, job_id: str, status: str, door: str) -> None:
        self._oracle.note(Note(ENDED, door, f"job/{job_id}", "end", status=status))
        told = {"recipient": f"mailbox/default/{BOSS}", "kind": f"job.{status}", "body": job_id}
        self._oracle.note(Note(ASKED, door, f"job/{job_id}", "end", **told))

    def _published(self, job_id: str, secret: str) -> None:
        """By our own client, which numbers, keeps and repeats."""
        publisher = Job(job_id, secret, mqtt=self._settings.mqtt, state_dir=self._state_dir)
        for seq in range(1, _EVENTS + 1):
            kind, detail = _kind(seq), f"{job_id} step {seq}"
            entered = False
            while True:
                try:
                    if entered:
                        publisher.resend()
                    else:
                        entered = True
                        publisher.publish(kind, detail)
                    break
                except TrunklineError as error:
                    self._wait(error)
            self._oracle.acked("mqtt", f"job/{job_id}", str(seq), job_id, content_hash(kind, detail))
        self._ended(job_id, "completed", "mqtt")

    def _by_hand(self, job_id: str, secret: str) -> None:
        """By somebody who signs rightly, and sends in another order, twice, or with a clock that is wrong."""
        middle = list(range(2, _EVENTS))
        is_mixed = self._draw.random() < self._schedule.reorder
        if is_mixed:
            self._draw.shuffle(middle)
            self.done[f"{REORDER}:delivery"] += 1
        for seq in (1, *middle, _EVENTS):
            if self._schedule.forged and self._draw.random() < 0.1 * self._schedule.forged:
                self._forge(job_id, seq)
            kind, detail = _kind(seq), f"{job_id} step {seq} by hand"
            pending = self._pending(job_id, secret, seq, kind, detail)
            receipt = self._deliver(job_id, secret, pending)
            if receipt.verdict == "rejected":
                raise AssertionError(f"job {job_id} seq {seq}: {receipt.reason}")
            self._oracle.acked(
                "mqtt", f"job/{job_id}", str(seq), job_id, content_hash(kind, detail), ordered=not is_mixed
            )
            if self._draw.random() < self._schedule.duplicates:
                self.done[f"{DUPLICATES}:delivery"] += 1
                self._deliver(job_id, secret, pending)
        self._ended(job_id, "completed", "mqtt")

    def _forge(self, job_id: str, seq: int) -> None:
        self.done[f"{FORGE}:events"] += 1
        detail = f"{job_id} forged {self._draw.getrandbits(40):x}"
        self._oracle.note(
            Note(FORGED, "mqtt", f"job/{job_id}", str(seq), hash=content_hash("completed", detail))
        )
        pending = self._pending(job_id, "somebody else's secret", seq, "completed", detail)
        self._deliver(job_id, "somebody else's secret", pending)

    def _pending(self, job_id: str, secret: str, seq: int, kind: str, detail: str) -> PendingEvent:
        self.done[f"{SKEW}:clients"] += bool(self._skew_s)
        now = datetime.now(UTC) + timedelta(seconds=self._skew_s)
        event: dict[str, Any] = {
            "schema_version": 1,
            "seq": seq,
            "job_id": job_id,
            "event": kind,
            "timestamp": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "detail": detail,
            "data": {},
        }
        return PendingEvent(seq, json.dumps(sign_event(event, secret), ensure_ascii=False), event=kind)

    def _deliver(self, job_id: str, secret: str, pending: PendingEvent) -> Receipt:
        found: list[Receipt] = []
        while True:
            try:
                # The tests' broker has no accounts.
                deliver(self._settings.mqtt, job_id, [pending], lambda _, receipt: found.append(receipt))
                return found[0]
            except TrunklineError as error:
                self._wait(error)

    def _wait(self, error: TrunklineError) -> None:
        if not self._clock.has_patience():
            raise GaveUp(str(error)) from error
        time.sleep(0.1)


class TaskLoad:
    """Gives an agent tasks by HTTP, and ends them with their tokens or by cancelling them."""

    def __init__(self, boss: HubClient, schedule: Schedule, oracle: Oracle, clock: Clock) -> None:
        self._boss, self._duplicates, self._oracle, self._clock = boss, schedule.duplicates, oracle, clock
        self._draw = random.Random(f"tasks/{schedule.seed}")

    def run(self) -> None:
        """Submit and end, one task after the other."""
        while self._clock.may_begin():
            body = {"agent_name": IDLE, "description": f"{self._draw.getrandbits(40):x}"}
            answer = self._boss.ask("POST", TASKS, duplicates=self._duplicates, says=_task_of, json=body)
            # A gateway that was killed while it launched has the task failed by its successor.
            if answer.status != 502:
                self._end(_told(answer, 201), content_hash(body["description"]))
            time.sleep(0.8)

    def _end(self, told: dict[str, Any], said: str) -> None:
        stream = f"task/{told['task']['id']}"
        self._oracle.acked("http", stream, "started", BOSS, said, ordered=False)
        how, status = self._draw.choice((("cancel", "cancelled"), ("complete", "completed")))
        token = str(told["token"]) if how == "complete" else None
        path = f"{TASKS}/{told['task']['id']}/{how}"
        answer = self._boss.ask_known("POST", path, token=token, json={})
        if answer.status == 200:
            self._oracle.note(Note(ENDED, "http", stream, "end", status=status))
        elif answer.status not in (401, 409):  # it has failed meanwhile
            raise AssertionError(f"{how} of a task: {shown(answer)}")


def _told(answer: Answer, status: int) -> dict[str, Any]:
    if answer.status != status:
        raise AssertionError(f"not {status}: {shown(answer)}")
    return dict(answer.json())


def _parts(answer: Answer, *names: str) -> object:
    """Return the parts of an answer that the answer to a repeated request must share."""
    return [answer.json().get(name) for name in names]


def _task_of(answer: Answer) -> object:
    # Its state goes on meanwhile.
    told = answer.json()
    return [told["task"]["id"], told["token"]] if answer.status == 201 else None


def _kind(seq: int) -> str:
    return "started" if seq == 1 else "completed" if seq == _EVENTS else "progress"
