"""Runs the fold over a plan of the demo: the ledger that the demo must find, without any broker."""

from __future__ import annotations

from collections import Counter
from typing import Any

from connectors.doors.mqtt_bridge.bridge_records import job_event_record
from connectors.tools.demo.outcome import Delivery
from connectors.tools.demo.plan import Plan, build_plan
from connectors.tools.demo.steps import Actor, Script
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import (
    JobCancellation,
    JobPick,
    JobRegistration,
)
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import OutgoingRecord, oversized
from tests.schemas.job_records import signed
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.strict_json import canonical

PREFIX = "python/mqtt/jobs"
LIMIT_BYTES = 64 * 1024
SENT_AT = "2026-11-21T10:00:00Z"
KEYRING = Keyring({"test": b"k" * 32}, "test")


def plan_of(jobs: int, seed: int = 1) -> Plan:
    """A plan for `jobs` jobs with fixed ids and secrets."""
    actors = [Actor(f"{number:08x}", f"secret-{number}") for number in range(jobs)]
    stranger = Actor("eeeeeeee", "stranger-secret")
    return build_plan(actors, stranger, seed=seed, sent_at=SENT_AT, payload_limit_bytes=LIMIT_BYTES)


class FoldedPlan:
    """The plan's messages, settled in the order of the scripts: `settled` by step, the rows, the deliveries."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rows: list[LedgerRow] = []
        self.settled: list[Settled] = []
        self.deliveries: list[Delivery] = []
        self._entries: dict[str, Entries] = {}
        for script in plan.scripts:
            self._play(script)

    def rejected(self) -> Counter[str]:
        """The number of rejected job events by reason."""
        expected = [step.expected for _, step in self.plan.steps() if step.expected is not None]
        return Counter(str(one.reason) for one in expected if one.verdict == "rejected")

    def count(self, verdict: str) -> int:
        """The number of job events with this verdict."""
        return sum(
            step.expected is not None and step.expected.verdict == verdict for _, step in self.plan.steps()
        )

    def row_dicts(self) -> list[dict[str, Any]]:
        """The rows as the ledger's reader gives them."""
        found: list[dict[str, Any]] = ledger_batch(self.rows).to_pylist()
        return found

    def _play(self, script: Script) -> None:
        player = FoldedPlayer(self, script)
        for step in script.steps:
            ce_id = step.action.play(player)
            if ce_id is not None:
                self.deliveries.append(Delivery(step, player.sent[-1].stream, ce_id))

    def settle(self, outgoing: OutgoingRecord) -> Settled:
        outgoing = oversized(outgoing, LIMIT_BYTES)
        record = as_read(outgoing, len(self.rows))
        settled = settle(record, self._entries.setdefault(outgoing.stream, Entries()), KEYRING, Entries())
        self.rows.append(ledger_row(record, settled, KEYRING))
        return settled


class FoldedPlayer:
    """The actions of a script, whose records are settled at once."""

    def __init__(self, plan: FoldedPlan, script: Script) -> None:
        self.plan, self.actor = plan, script.actor or Actor("", "")
        # By step; a step that sends no job event repeats the record before it.
        self.sent: list[OutgoingRecord] = []
        self.seq = 0
        if script.actor is not None:
            plan.settle(
                JobRegistration(
                    sealed_secret=KEYRING.seal(
                        script.actor.secret.encode(), job_secret_purpose(self.actor.job_id)
                    ),
                    job_id=self.actor.job_id,
                    description=script.title,
                ).record(door="http", principal="operator")
            )

    def publish(self, event: str, detail: str, data: dict[str, Any]) -> str:
        """An event as the agent signs it."""
        self.seq += 1
        told = {"job_id": self.actor.job_id, "detail": detail, "data": data}
        moment = f"2026-11-21T10:00:{self.seq:02d}.500Z"
        payload = canonical(signed(self.seq, event, self.actor.secret, timestamp=moment, **told))
        return self.send(self.actor.job_id, payload, False)

    def send(self, topic_id: str, payload: bytes, retain: bool) -> str:
        """Any bytes."""
        return self._sent(job_event_record(PREFIX, f"{PREFIX}/{topic_id}/events", payload, None))

    def send_again(self, of: int) -> str:
        """The record of an earlier step."""
        return self._sent(self.sent[of])

    def cancel(self) -> None:
        """The operator's record."""
        cancelled = JobCancellation(job_id=self.actor.job_id, request_id="demo")
        self._append(cancelled.record(door="http", principal="operator"))

    def pick(self) -> None:
        """The session's record."""
        self._append(JobPick(job_id=self.actor.job_id, session="demo").record(principal="demo", door="http"))

    def _sent(self, record: OutgoingRecord) -> str:
        self.sent.append(record)
        self.plan.settled.append(self.plan.settle(record))
        return record.ce_id

    def _append(self, record: OutgoingRecord) -> None:
        self.sent.append(record)
        self.plan.settle(record)
