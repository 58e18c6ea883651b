"""Runs the fold over a plan of the demo: the ledger that the demo must find, without any broker."""

from __future__ import annotations

from collections import Counter
from typing import Any

from connectors.doors.mqtt_bridge.bridge_records import job_event_record
from connectors.tools.demo.outcome import Delivery
from connectors.tools.demo.plan import Plan, build_plan
from connectors.tools.demo.scenes import session_name
from connectors.tools.demo.steps import Actor, AgentEvent, Cancellation, Pick, RawMessage, Script, SentAgain
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import (
    JobCancellation,
    JobPick,
    JobRegistration,
)
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.tables.ledger_arrow import ledger_batch
from schemas.wire.record import OutgoingRecord, oversized
from tests.schemas.job_records import signed
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import events_topic

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
        return Counter(str(step.reason) for _, step in self.plan.steps() if step.verdict == "rejected")

    def count(self, verdict: str) -> int:
        """The number of job events with this verdict."""
        return sum(step.verdict == verdict for _, step in self.plan.steps())

    def row_dicts(self) -> list[dict[str, Any]]:
        """The rows as the ledger's reader gives them."""
        found: list[dict[str, Any]] = ledger_batch(self.rows).to_pylist()
        return found

    def _play(self, script: Script) -> None:
        sent: dict[int, OutgoingRecord] = {}
        seq = 0
        if script.actor is not None:
            actor = script.actor
            self._settle(
                JobRegistration(
                    sealed_secret=KEYRING.seal(actor.secret.encode(), job_secret_purpose(actor.job_id)),
                    job_id=actor.job_id,
                    description=script.title,
                ).record(door="cli", principal="operator")
            )
        for number, step in enumerate(script.steps):
            action = step.action
            if isinstance(action, Cancellation):
                assert script.actor is not None
                self._settle(
                    JobCancellation(job_id=script.actor.job_id, request_id="demo").record(
                        door="cli", principal="operator"
                    )
                )
                continue
            if isinstance(action, Pick):
                assert script.actor is not None
                picked = JobPick(job_id=script.actor.job_id, session=session_name(script.actor.job_id)).record(
                    principal="demo", door="http"
                )
                self._settle(picked)
                continue
            if isinstance(action, AgentEvent):
                assert script.actor is not None
                seq += 1
                sent[number] = _agent_record(script.actor, action, seq)
            elif isinstance(action, RawMessage):
                topic = f"{PREFIX}/{action.topic_id}/events"
                sent[number] = job_event_record(PREFIX, topic, action.payload, None)
            else:
                assert isinstance(action, SentAgain)
                sent[number] = sent[action.of]
            self.settled.append(self._settle(sent[number]))
            self.deliveries.append(Delivery(step, sent[number].stream, sent[number].ce_id))

    def _settle(self, outgoing: OutgoingRecord) -> Settled:
        outgoing = oversized(outgoing, LIMIT_BYTES)
        record = as_read(outgoing, len(self.rows))
        settled = settle(record, self._entries.setdefault(outgoing.stream, Entries()), KEYRING, Entries())
        self.rows.append(ledger_row(record, settled, KEYRING))
        return settled


def _agent_record(actor: Actor, action: AgentEvent, seq: int) -> OutgoingRecord:
    told = {"job_id": actor.job_id, "detail": action.detail, "data": action.data}
    moment = f"2026-11-21T10:00:{seq:02d}.500Z"
    payload = canonical(signed(seq, action.event, actor.secret, timestamp=moment, **told))
    return job_event_record(PREFIX, events_topic(PREFIX, actor.job_id), payload, None)
