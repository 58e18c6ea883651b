"""One run of the demo on a running stack: register jobs, play the plan, wait for the ledger, compare.

Agents publish with `Job`; an unruly connection sends everything else.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from connectors.hub.live.table_progress_reader import ViewProgressReader
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.log.log_end import LogEnd
from connectors.log.publisher import Publisher
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from connectors.tools.demo.outcome import (
    OUTCOME_COLUMNS,
    Delivery,
    Outcome,
    ReceiptReport,
    Row,
    check_receipts,
    compare,
    in_scope,
    still_missing,
)
from connectors.tools.demo.plan import Plan, build_plan
from connectors.tools.demo.progress import Progress
from connectors.tools.demo.scenes import (
    Tick,
    agents_talk,
    listeners_answer,
    pick_job,
    session_name,
    sessions_end,
)
from connectors.tools.demo.steps import Actor, AgentEvent, Cancellation, Pick, RawMessage, Script
from connectors.tools.demo.unruly_connection import UnrulyConnection
from connectors.tools.job_tools.job_registry import cancel_job, register_job
from schemas.keys.sealing import load_keyring
from schemas.log_access.event_topic import REACH_TIMEOUT_S
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import JOB_CANCELLED, JOB_REGISTERED
from schemas.wire.record import refused_stream
from trunkline_agent.broker import job_broker
from trunkline_agent.jobs.job import Job
from trunkline_agent.mqtt.mqtt_login import wait_for_login
from trunkline_agent.wire.ids import JOB, new_job_id, stream_key
from trunkline_agent.wire.signing import new_secret
from trunkline_agent.wire.topics import job_id_of

QUIET_LIMIT_S: Final = 60.0
AT_ONCE: Final = 4
_TICK_S: Final = 0.1
_DOOR: Final = "mqtt"
_ACCOUNT_S: Final = 30.0
_LOOK_S: Final = 0.2
_CLOCK_MARGIN: Final = timedelta(minutes=5)


@dataclass(frozen=True)
class Performance:
    """The result of a run of the demo.

    Attributes:
        plan: The plan that was played.
        deliveries: The events that were sent.
        rows: The rows of this run in the ledger.
        outcome: The comparison of the ledger with the plan.
        receipts: The comparison of the receipts with the ledger.
        lines: Texts for the report about sessions, agents and listeners.
    """

    plan: Plan
    deliveries: list[Delivery]
    rows: list[Row]
    outcome: Outcome
    receipts: ReceiptReport
    lines: list[str]


def perform(settings: Settings, jobs: int, progress: Progress, tick: Tick) -> Performance:
    """Run the demo on the running stack that the settings name, and compare the ledger with the plan.

    It registers jobs, sends all events and waits until the ledger has them. Differences between ledger and plan
    raise nothing: they are in the result. So are events that did not reach the ledger in time.

    Args:
        settings: The settings of the stack.
        jobs: The number of jobs to register, at least one for each role.
        progress: The display of the steps.
        tick: Called a few times a second, to restart parts of the stack that have ended.

    Raises:
        TrunklineError: A part of the stack cannot be reached (BackboneUnreachable), or refuses a request.
    """
    reader = LedgerReader(settings)
    before = reader.version()
    started = datetime.now(UTC)
    with Publisher(settings) as publisher, UnrulyConnection(role_mqtt(settings, OPERATOR)) as unruly:
        stage = Stage(settings, publisher, unruly, progress, tick)
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
        progress.begin(f"Agents and unruly clients send {plan.sent} events over MQTT")
        deliveries = play(plan, stage)
        progress.done(f"all {len(deliveries)} are in Kafka")
        receipts = unruly.receipts()
    progress.begin("Wait until the ledger has all of them")
    missing = _wait(stage, reader, -1 if before is None else before, plan, deliveries)
    progress.done("it has them" if not missing else f"{missing} are missing")
    progress.begin("Compare the ledger with the plan")
    where = LedgerFilter(since=started - _CLOCK_MARGIN)
    every = reader.rows(where, OUTCOME_COLUMNS).rows.to_pylist() if reader.exists() else []
    own = in_scope(every, deliveries, plan.states)
    outcome = compare(own, deliveries, plan.states)
    report_of_receipts = check_receipts(receipts, own)
    ended = sessions_end(settings, stage.picked, tick)
    differences = [*outcome.differences, *report_of_receipts.differences, *ended.differences]
    lines = ended.lines
    progress.done(_result(differences))
    for title, play_scene in (
        ("Two agents talk through the hub, one of them is killed", agents_talk),
        ("Listeners of the XML pump are asked, and ask each other", listeners_answer),
    ):
        progress.begin(title)
        scene = play_scene(settings, tick)
        progress.done(_result(scene.differences))
        lines += scene.lines
        differences += scene.differences
    _wait_for_views(settings, tick)
    outcome = replace(outcome, differences=differences)
    return Performance(plan, deliveries, own, outcome, report_of_receipts, lines)


def _result(differences: list[str]) -> str:
    return f"{len(differences)} differences" if differences else "as planned"


def _wait_for_views(settings: Settings, tick: Tick) -> None:
    """Wait until the view tables have all that is in the log now, for `QUIET_LIMIT_S` at most."""
    end, views = LogEnd(settings.kafka), ViewProgressReader(settings)
    ends = end.offsets(REACH_TIMEOUT_S)
    end.close()
    deadline = time.monotonic() + QUIET_LIMIT_S
    while time.monotonic() < deadline:
        progress = views.read()
        if progress is not None and all(progress.offsets.get(number, 0) >= at for number, at in ends.items()):
            return
        tick()
        time.sleep(_LOOK_S)


def _register(settings: Settings, publisher: Publisher, jobs: int) -> list[Actor]:
    keyring = load_keyring(settings)
    actors = []
    for number in range(1, jobs + 1):
        job_id = new_job_id()
        description, session = f"demo job {number} of {jobs}", session_name(job_id)
        job = register_job(publisher, keyring, description, session=session, principal="demo", job_id=job_id)
        actors.append(Actor(job.job_id, job.secret))
    for actor in actors:
        wait_for_login(job_broker(settings.mqtt, actor.job_id, actor.secret), _ACCOUNT_S)
    return actors


def _wait(
    stage: Stage, reader: LedgerReader, after_version: int, plan: Plan, deliveries: list[Delivery]
) -> int:
    """Follow the ledger until every message has its row, or no row came for `QUIET_LIMIT_S`.

    Return how many rows are missing.
    """
    columns = ["stream_kind", "stream_id", "ce_id", "type"]
    found: list[Row] = []
    last_news = time.monotonic()
    actions = [step.action for script in plan.scripts for step in script.steps]
    records = len(plan.states) + sum(isinstance(action, Cancellation) for action in actions)

    def missing() -> int:
        types = Counter(row["type"] for row in found)
        other = records - types[JOB_REGISTERED] - types[JOB_CANCELLED]
        return still_missing(found, deliveries) + max(0, other)

    def stop() -> bool:
        stage.tick()
        stage.progress.update(f"{len(deliveries) + records - left} of {len(deliveries) + records} rows")
        return left == 0 or time.monotonic() - last_news > QUIET_LIMIT_S

    left = missing()
    for part in reader.follow(after_version, columns=columns, stop=stop):
        found += in_scope(part.rows.to_pylist(), deliveries, plan.states)
        left, last_news = missing(), time.monotonic()
    return left


@dataclass(frozen=True)
class Stage:
    """The connections that a run of the demo uses. `play` adds to `picked` the sessions that picked a job."""

    settings: Settings
    publisher: Publisher
    unruly: UnrulyConnection
    progress: Progress
    tick: Tick
    picked: list[str] = field(default_factory=list)


def play(plan: Plan, stage: Stage) -> list[Delivery]:
    """Send all events of the plan, and return them in the order in which they were sent.

    It blocks until the end. Four scripts run at once, each on a thread of its own and in its own order. If a
    script fails, the others are stopped, and its error is raised: BackboneUnreachable or Refused.
    """
    stopping = threading.Event()
    sent: list[Delivery] = []
    threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="demo")
    try:
        waiting = {threads.submit(_play_script, script, stage, sent, stopping) for script in plan.scripts}
        while waiting:
            done, waiting = wait(waiting, _TICK_S, FIRST_EXCEPTION)
            for future in done:
                future.result()
            stage.tick()
            stage.progress.update(f"{len(sent)} of {plan.sent}")
    finally:
        stopping.set()
        threads.shutdown(wait=False, cancel_futures=True)
    return sent


def _play_script(script: Script, stage: Stage, sent: list[Delivery], stopping: threading.Event) -> None:
    agent = None
    if script.actor is not None:
        state_dir = stage.settings.data_path / "publisher"
        agent = Job(
            script.actor.job_id,
            script.actor.secret,
            mqtt=stage.settings.mqtt,
            state_dir=state_dir,
            payload_bytes=stage.settings.limits.payload_bytes,
        )
    ids: dict[int, str] = {}
    for number, step in enumerate(script.steps):
        if stopping.is_set():
            return
        action = step.action
        if isinstance(action, RawMessage):
            ids[number] = stage.unruly.send(action.topic_id, action.payload, retain=action.retain)
            sent.append(Delivery(step, _stream(stage.settings, action.topic_id), ids[number]))
            continue
        assert script.actor is not None and agent is not None  # noqa: S101  strangers send only raw bytes
        job_id = script.actor.job_id
        if isinstance(action, Cancellation):
            cancel_job(stage.publisher, job_id, reason="the demo's operator changed her mind")
            continue
        if isinstance(action, Pick):
            if (session := pick_job(stage.settings, job_id)) is not None:
                stage.picked.append(session)
            continue
        if isinstance(action, AgentEvent):
            ids[number] = agent.publish(action.event, action.detail, action.data).ce_id
            stage.unruly.note_sent(ids[number])
        else:
            ids[number] = stage.unruly.send_again(job_id, ids[action.of])
        sent.append(Delivery(step, stream_key(JOB, job_id), ids[number]))


def _stream(settings: Settings, topic_id: str) -> str:
    prefix = settings.mqtt.topic_prefix
    job_id = job_id_of(prefix, f"{prefix}/{topic_id}/events")
    return refused_stream(_DOOR) if job_id is None else stream_key(JOB, job_id)
