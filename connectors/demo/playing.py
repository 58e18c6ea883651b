"""Plays the plan: agents publish with `JobPublisher`, an unruly connection sends everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

from connectors.agent_sdk.mqtt_publisher import JobPublisher
from connectors.demo.outcome import Delivery
from connectors.demo.plan import Plan
from connectors.demo.scenes import pick_job
from connectors.demo.steps import AgentEvent, Cancellation, Pick, RawMessage, Script
from connectors.demo.unruly_connection import UnrulyConnection
from connectors.job_tools.job_registry import cancel_job
from connectors.log.publisher import Publisher
from connectors.mqtt_link.topics import job_id_of
from schemas.settings.settings import Settings
from schemas.wire.ids import JOB, stream_key
from schemas.wire.record import refused_stream

AT_ONCE: Final = 4
_TICK_S: Final = 0.1
_DOOR: Final = "mqtt"


@dataclass(frozen=True)
class Stage:
    """The parts that the scripts use. `picked` receives the sessions that picked a job."""

    settings: Settings
    publisher: Publisher
    unruly: UnrulyConnection
    picked: list[str]


def play(plan: Plan, stage: Stage, progress: Callable[[int], None]) -> list[Delivery]:
    """Play all scripts, four at once, and each in its order. Return the events that were sent.

    `progress` is called ten times a second from this thread with the number of events sent so far. Raises the
    error of the first script that fails: BackboneUnreachable, Refused.
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
            progress(len(sent))
    finally:
        stopping.set()
        threads.shutdown(wait=False, cancel_futures=True)
    return sent


def _play_script(script: Script, stage: Stage, sent: list[Delivery], stopping: threading.Event) -> None:
    agent = None
    if script.actor is not None:
        state_dir = stage.settings.data_path / "publisher"
        agent = JobPublisher(stage.settings, script.actor.job_id, script.actor.secret, state_dir)
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
