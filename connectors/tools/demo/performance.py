"""One run of the demo on a running stack: register jobs, play the plan, wait for the ledger, compare.

Agents publish with `Job`; an unruly connection sends everything else.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from connectors.hub.live.table_progress_reader import LedgerProgressReader, ViewProgressReader
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.log.log_end import LogEnd
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
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
)
from connectors.tools.demo.plan import Plan, build_plan
from connectors.tools.demo.scenes import (
    Tick,
    agents_talk,
    listeners_answer,
    operator_client,
    pick_job,
    sessions_end,
)
from connectors.tools.demo.stage_stack import Progress
from connectors.tools.demo.steps import Actor, Script
from connectors.tools.demo.unruly_connection import UnrulyConnection
from schemas.log_access.event_topic import REACH_TIMEOUT_S
from schemas.settings.settings import Settings
from schemas.wire.record import refused_stream
from trunkline_agent.broker import job_broker
from trunkline_agent.errors import TrunklineError
from trunkline_agent.jobs.job import Job
from trunkline_agent.mqtt.mqtt_client import wait_for_login
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
    ledger, views = LedgerProgressReader(settings), ViewProgressReader(settings)
    started = datetime.now(UTC)
    with operator_client(settings) as operator, UnrulyConnection(role_mqtt(settings, OPERATOR)) as unruly:
        stage = Stage(settings, operator, unruly, progress, tick)
        progress.begin(f"Register {jobs} jobs at the gateway")
        actors = _register(settings, operator, jobs)
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
    missing = _wait_for_tables(stage, lambda: {} if (at := ledger.read()) is None else at.ends, progress.update)
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
    _wait_for_tables(stage, lambda: {} if (at := views.read()) is None else at.offsets)
    outcome = replace(outcome, differences=differences)
    return Performance(plan, deliveries, own, outcome, report_of_receipts, lines)


def _result(differences: list[str]) -> str:
    return f"{len(differences)} differences" if differences else "as planned"


def _wait_for_tables(
    stage: Stage,
    ends_of_tables: Callable[[], Mapping[int, int]],
    tell: Callable[[str], object] = lambda _text: None,
) -> int:
    """Wait until tables have all that is in the log now, or no record came for `QUIET_LIMIT_S`.

    Return how many records are missing. `ends_of_tables` returns the first offset that they lack, by partition.
    `tell` is called with texts about the progress.
    """
    with closing(LogEnd(stage.settings.kafka)) as log:
        ends = log.offsets(REACH_TIMEOUT_S)
    found: Mapping[int, int] = {}
    missing, news_at = -1, 0.0
    while missing and (missing < 0 or time.monotonic() - news_at < QUIET_LIMIT_S):
        with suppress(TrunklineError):  # a table that is being swapped can be read the next time
            found = ends_of_tables()
        left = sum(max(0, end - found.get(partition, 0)) for partition, end in ends.items())
        if left != missing:
            missing, news_at = left, time.monotonic()
        stage.tick()
        tell(f"{missing} of {sum(ends.values())} records are missing")
        time.sleep(_LOOK_S if missing else 0)
    return missing


def _register(settings: Settings, operator: GatewayClient, jobs: int) -> list[Actor]:
    actors = []
    for number in range(1, jobs + 1):
        session = f"demo-{secrets.token_hex(4)}"
        body = {"description": f"demo job {number} of {jobs}", "session": session}
        job = operator.post(path_of("jobs"), body)
        actors.append(Actor(job["job_id"], job["secret"], session))
    for actor in actors:
        wait_for_login(job_broker(settings.mqtt, actor.job_id, actor.secret), _ACCOUNT_S)
    return actors


@dataclass(frozen=True)
class Stage:
    """The connections that a run of the demo uses. `play` adds to `picked` the sessions that picked a job."""

    settings: Settings
    operator: GatewayClient
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


class _Player:
    """The agent of one script, and the connections for what else happens to its job."""

    def __init__(self, stage: Stage, actor: Actor | None) -> None:
        self._stage = stage
        self._actor = actor
        self.sent: list[str | None] = []
        if actor is not None:
            self._agent = Job(
                actor.job_id,
                actor.secret,
                mqtt=stage.settings.mqtt,
                state_dir=stage.settings.data_path / "publisher",
                payload_bytes=stage.settings.limits.payload_bytes,
            )

    @property
    def job_id(self) -> str:
        """The job. Strangers, which have none, only send raw bytes."""
        assert self._actor is not None  # noqa: S101
        return self._actor.job_id

    def publish(self, event: str, detail: str, data: dict[str, Any]) -> str:
        ce_id = self._agent.publish(event, detail, data).ce_id
        self._stage.unruly.note_sent(ce_id)
        return ce_id

    def send(self, topic_id: str, payload: bytes, retain: bool) -> str:
        return self._stage.unruly.send(topic_id, payload, retain=retain)

    def send_again(self, of: int) -> str:
        return self._stage.unruly.send_again(self.job_id, str(self.sent[of]))

    def cancel(self) -> None:
        why = {"reason": "the demo's operator changed her mind"}
        self._stage.operator.post(path_of("jobs", self.job_id, "cancel"), why)

    def pick(self) -> None:
        assert self._actor is not None  # noqa: S101
        if pick_job(self._stage.operator, self._actor):
            self._stage.picked.append(self._actor.session)


def _play_script(script: Script, stage: Stage, sent: list[Delivery], stopping: threading.Event) -> None:
    player = _Player(stage, script.actor)
    for step in script.steps:
        if stopping.is_set():
            return
        ce_id = step.action.play(player)
        player.sent.append(ce_id)
        if ce_id is not None:
            job_id = step.action.arguments[0] if step.action.method == "send" else player.job_id
            sent.append(Delivery(step, _stream(stage.settings, job_id), ce_id))


def _stream(settings: Settings, topic_id: str) -> str:
    prefix = settings.mqtt.topic_prefix
    job_id = job_id_of(prefix, f"{prefix}/{topic_id}/events")
    return refused_stream(_DOOR) if job_id is None else stream_key(JOB, job_id)
