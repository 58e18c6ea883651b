"""The sources of `trunkline watch`, MQTT and the gateway, and the loop that prints their events."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from connectors.agent_sdk.event_subscription import Message
from connectors.agent_sdk.job_watcher import EXIT_TIMED_OUT, JobWatcher, Outcomes, Sight, Timers
from connectors.cli.jobs.watch_brokers import brokers_of, brokers_of_all, listening
from connectors.cli.shared.notes import Notes
from connectors.gateway_client.event_stream import GAP, SETTLED, EventStream
from connectors.gateway_client.gateway_client import GatewayClient, path_of, reachable
from connectors.job_tools.job_secrets import find_secret, kept_secrets, stored_jobs
from connectors.mqtt_link.topics import job_id_of
from schemas.errors import NotFound
from schemas.fold.life_cycles import PENDING, RUNNING
from schemas.settings.settings import Settings
from schemas.streams.job.job_event import JOB_EVENT
from schemas.streams.job.job_registry import JOB_SECRET_ROTATED, JOB_TERMINAL
from schemas.wire.ids import JOB
from schemas.wire.verdicts import ACCEPTED

NextSights = Callable[[float], list[Sight]]
"""Waits at most this many seconds, and returns the sights until then."""
READY_VARIABLE: Final = "TRUNKLINE_READY_FILE"
_LOOK_S: Final = 1.0
_LIST_LIMIT: Final = 1000
_NOTES: Final = Notes("watch")


def watch(next_sights: NextSights, outcomes: Outcomes, timers: Timers) -> int:
    """Print accepted events until all jobs have ended or a timer has run out. Returns the exit code."""
    while True:
        code = outcomes.exit_code()
        if code is not None:
            return code
        left_s = timers.left_s()
        if left_s <= 0:
            not_ended = ", ".join(outcomes.open_jobs()) or "none was seen"
            _NOTES.say(f"{timers.ran_out()}; not ended: {not_ended}")
            return EXIT_TIMED_OUT
        for sight in next_sights(min(left_s, _LOOK_S)):
            if not outcomes.follows(sight.job_id):
                continue
            shown = outcomes.take(sight)
            if shown.line is not None:
                print(shown.line, flush=True)
                timers.restart_idle()
            if shown.note is not None:
                _NOTES.say(f"{shown.job_id}: {shown.note}")


@contextmanager
def mqtt_source(settings: Settings, jobs: list[str], outcomes: Outcomes) -> Iterator[NextSights]:
    """Follow events over MQTT, from our broker and the jobs' own brokers, and verify them.

    Raises NotFound for a job without a stored secret, Refused and BackboneUnreachable for the broker of a job
    that is named.
    """

    def watcher(job: str, secret: str) -> JobWatcher:
        return JobWatcher(settings, job, secret, lambda: kept_secrets(settings, job))

    watchers = {job: watcher(job, _secret(settings, job)) for job in jobs}
    unknown: set[str] = set()
    prefix = settings.mqtt.topic_prefix
    places = brokers_of(settings, jobs, _NOTES.say) if jobs else brokers_of_all(settings, stored_jobs(settings))

    def sights(message: Message) -> list[Sight]:
        job = job_id_of(prefix, message.topic)
        if job is None or job in unknown:
            return []
        if job not in watchers:
            secret = find_secret(settings, job)
            if secret is None:
                unknown.add(job)
                _NOTES.say(f"{job}: its secret is not stored on this machine; --settled shows its events")
                return []
            watchers[job] = watcher(job, secret)
        seen = watchers[job].see(message.topic, message.payload, message.traceparent)
        return [seen._replace(before=message.retained)]

    with listening(places, _NOTES.lost, _NOTES.say) as (next_message, followed):
        if not jobs:
            for job in followed:
                outcomes.take(Sight(job))

        def next_sights(timeout_s: float) -> list[Sight]:
            message = next_message(timeout_s)
            return [] if message is None else sights(message)

        _ready()
        yield next_sights


@contextmanager
def settled_source(settings: Settings, jobs: list[str], outcomes: Outcomes) -> Iterator[NextSights]:
    """Follow the events that the gateway settles. The current state of the jobs comes first.

    Raises NotFound for a job that does not exist.
    """
    path = path_of("jobs", jobs[0], "events") if len(jobs) == 1 else path_of("events")
    parameters = None if len(jobs) == 1 else {"kind": JOB}
    with (
        reachable(settings) as gateway,
        EventStream(gateway, path, parameters, lost=_NOTES.lost("gateway")) as stream,
    ):

        def next_sights(timeout_s: float) -> list[Sight]:
            event = stream.next(timeout_s)
            if event is None:
                return []
            if event.name == GAP:
                _NOTES.say("events were missed: the gateway has dropped them from memory, the ledger has them")
                # Open jobs may have ended in the events that were missed.
                still_open = [] if jobs else outcomes.open_jobs()
                return (_states(gateway, still_open) if still_open else []) + _states(gateway, jobs)
            return _settled_sights(event.data) if event.name == SETTLED else []

        stream.first(settings.gateway.settle_timeout_s)
        # Read once the stream is open, so that the stream has every event after this answer.
        first = _states(gateway, jobs)
        _ready()
        queued = iter([first])
        yield lambda timeout_s: next_sights(0.0) or next(queued, []) or next_sights(timeout_s)


def _states(gateway: GatewayClient, jobs: list[str]) -> list[Sight]:
    """Return the state of the named jobs; without names, of all jobs that have not ended."""
    if jobs:
        rows = [gateway.get(path_of("jobs", job)) for job in jobs]
    else:
        rows = []
        for state in (PENDING, RUNNING):
            rows += gateway.get(path_of("jobs"), {"state": state, "limit": _LIST_LIMIT})["jobs"]
    states = ((row["job_id"], row["status"]) for row in rows)
    return [Sight(job, state, note=f"is {state}" if state in JOB_TERMINAL else None) for job, state in states]


def _settled_sights(data: dict[str, Any]) -> list[Sight]:
    kind, _, job = data["stream"].partition("/")
    if kind != JOB:
        return []
    if data["verdict"] != ACCEPTED:
        why = data["verdict"] if data["reason"] is None else f"{data['reason']}: {data['why']}"
        return [Sight(job, note=f"a record does not count: {why}")]
    status = data["status_after"]
    if data["type"] == JOB_EVENT:
        return [Sight(job, status, json.dumps(data["body"], separators=(",", ":")))]
    note = "has a new secret" if data["type"] == JOB_SECRET_ROTATED else f"is {status}"
    return [Sight(job, status, note=note)]


def _secret(settings: Settings, job: str) -> str:
    found = find_secret(settings, job)
    if found is None:
        raise NotFound(
            f"the secret of job {job} is not stored on this machine, so its events cannot be verified here; "
            f"'trunkline watch --job {job} --settled' follows what the backbone has verified"
        )
    return found


def _ready() -> None:
    """Signal the program that started us that from now on no event is missed."""
    file = os.environ.get(READY_VARIABLE)
    if file:
        Path(file).touch()
