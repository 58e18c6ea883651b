"""One run of the demo on a running stack: register, play, wait for the ledger, compare."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from connectors.demo.gateway_scene import GatewayScene, session_name
from connectors.demo.hub_scene import HubScene
from connectors.demo.outcome import (
    OUTCOME_COLUMNS,
    Delivery,
    Outcome,
    Row,
    compare,
    in_scope,
    still_missing,
)
from connectors.demo.plan import Plan, build_plan
from connectors.demo.playing import Stage, play
from connectors.demo.progress import Progress
from connectors.demo.pump_scene import PumpScene
from connectors.demo.steps import Actor, Cancellation
from connectors.demo.told_verdicts import Told, told_verdicts
from connectors.demo.unruly_connection import UnrulyConnection
from connectors.job_tools.job_registry import register_job
from connectors.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.log.publisher import Publisher
from connectors.mqtt_link.mqtt_credentials import OPERATOR, job_mqtt, role_mqtt
from connectors.mqtt_link.mqtt_login import wait_for_login
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import Settings
from schemas.wire.ids import new_job_id
from schemas.wire.record import JOB_CANCELLED, JOB_REGISTERED
from schemas.wire.signing import new_secret

QUIET_LIMIT_S: Final = 60.0
_ACCOUNT_S: Final = 30.0
_CLOCK_MARGIN: Final = timedelta(minutes=5)


@dataclass(frozen=True)
class Performance:
    """What was planned, what was sent, what the ledger holds of it, and the verdict over it. `told`: what the
    receipts said; `sessions`: those that picked a job and ended with it; `tasks`: a line on each task,
    and on each question to the XML pump.
    """

    plan: Plan
    deliveries: list[Delivery]
    rows: list[Row]
    outcome: Outcome
    told: Told
    sessions: list[str]
    tasks: list[str]


def perform(settings: Settings, jobs: int, progress: Progress, tick: Callable[[], None]) -> Performance:
    """Run the demo's events through the stack that the settings name.

    `tick` is called a few times a second. Raises BackboneUnreachable and what else the parts raise; a ledger
    that differs from the plan is no error but stands in the outcome.
    """
    reader = LedgerReader(settings)
    before = reader.version()
    started = datetime.now(UTC)
    scene = GatewayScene(settings)
    with Publisher(settings) as publisher, UnrulyConnection(role_mqtt(settings, OPERATOR)) as unruly:
        progress.begin(f"Register {jobs} jobs through Kafka")
        actors = _register(settings, publisher, jobs)
        progress.done("registered, each has its account at the MQTT broker")
        plan = build_plan(
            actors,
            Actor(new_job_id(), new_secret()),
            seed=secrets.randbits(32),
            sent_at=started.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            payload_limit_bytes=settings.limits.payload_bytes,
        )
        progress.begin(f"Agents and troublemakers send {plan.sent} events over MQTT")

        def told(sent: int) -> None:
            tick()
            progress.tell(f"{sent} of {plan.sent}")

        stage = Stage(settings, publisher, unruly, scene, settings.data_path / "publisher")
        deliveries = play(plan, stage, told)
        progress.done(f"all {len(deliveries)} are in Kafka")
        receipts = unruly.told()
    progress.begin("Wait until the ledger has all of it")
    missing = _wait(reader, -1 if before is None else before, plan, deliveries, progress, tick)
    progress.done("it has" if not missing else f"{missing} are missing")
    progress.begin("Compare the ledger with the plan")
    where = LedgerFilter(since=started - _CLOCK_MARGIN)
    every = reader.rows(where, OUTCOME_COLUMNS).rows.to_pylist() if reader.exists() else []
    own = in_scope(every, deliveries, plan.states)
    outcome = compare(own, deliveries, plan.states)
    verdicts = told_verdicts(receipts, own)
    wrong = [*outcome.differences, *verdicts.differences, *scene.wait_closed()]
    progress.done("as planned" if not wrong else f"{len(wrong)} differences")
    progress.begin("Two agents talk through the hub, one of them is killed")
    hub = HubScene(settings)
    trouble = hub.play(tick)
    progress.done("as planned" if not trouble else f"{len(trouble)} differences")
    progress.begin("Listeners of the XML pump are asked, and ask each other")
    pump = PumpScene(settings)
    trouble += pump.play(tick)
    progress.done("as planned" if not trouble else f"{len(trouble)} differences")
    outcome = replace(outcome, differences=[*wrong, *trouble])
    return Performance(plan, deliveries, own, outcome, verdicts, scene.picked, [*hub.told, *pump.told])


def _register(settings: Settings, publisher: Publisher, jobs: int) -> list[Actor]:
    keyring = load_keyring(settings)
    actors = []
    for number in range(1, jobs + 1):
        job_id = new_job_id()
        description, session = f"demo job {number} of {jobs}", session_name(job_id)
        job = register_job(publisher, keyring, description, session=session, principal="demo", job_id=job_id)
        actors.append(Actor(job.job_id, job.secret))
    for actor in actors:
        wait_for_login(job_mqtt(settings.mqtt, actor.job_id, actor.secret), _ACCOUNT_S)
    return actors


def _wait(
    reader: LedgerReader,
    after_version: int,
    plan: Plan,
    deliveries: list[Delivery],
    progress: Progress,
    tick: Callable[[], None],
) -> int:
    """Follow the ledger until every message has its row. Gives up after `QUIET_LIMIT_S` without a new one.

    Returns how many rows are missing.
    """
    columns = ["stream_kind", "stream_id", "ce_id", "type"]
    found: list[Row] = []
    last_news = time.monotonic()
    records = len(plan.states) + sum(
        isinstance(step.action, Cancellation) for script in plan.scripts for step in script.steps
    )

    def missing() -> int:
        types = Counter(row["type"] for row in found)
        other = records - types[JOB_REGISTERED] - types[JOB_CANCELLED]
        return still_missing(found, deliveries) + max(0, other)

    def stop() -> bool:
        tick()
        progress.tell(f"{len(deliveries) + records - left} of {len(deliveries) + records} rows")
        return left == 0 or time.monotonic() - last_news > QUIET_LIMIT_S

    left = missing()
    for part in reader.follow(after_version, columns=columns, stop=stop):
        found += in_scope(part.rows.to_pylist(), deliveries, plan.states)
        left, last_news = missing(), time.monotonic()
    return left
