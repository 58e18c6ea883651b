"""The sources of `trunkline watch`, MQTT and the gateway, and the loop that prints their events.

Over MQTT it follows our broker, and the brokers of single jobs (JE-13). 'jobs register' and 'jobs pick' store a
job's broker beside its secret; for other jobs the gateway names it. The gateway gives no password; operators
get it sealed, and open it with the master key.
"""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import SecretStr, ValidationError

from connectors.cli.shared.text_output import Notes
from connectors.plumbing.gateway_client.event_stream import GAP, SETTLED, EventStream
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of, reachable
from connectors.plumbing.mqtt_link.broker_settings import DELEGATOR, role_mqtt, same_broker
from connectors.tools.job_tools.job_files import (
    JobBroker,
    find_broker,
    find_secret,
    kept_secrets,
    secret_path,
    stored_jobs,
)
from connectors.tools.job_tools.job_watcher import (
    EXIT_TIMED_OUT,
    EventSubscription,
    JobWatcher,
    Message,
    Outcomes,
    Sight,
    Timers,
)
from schemas.fold.stream_kind import PENDING, RUNNING
from schemas.keys.sealing import UnsealError, broker_password_purpose, load_keyring
from schemas.settings.settings import MqttSettings, Settings, SettingsError
from schemas.streams.job.job_registry import JOB_EVENT, JOB_SECRET_ROTATED, JOB_TERMINAL, BrokerOverlay
from trunkline_agent.broker import broker_name
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.topics import events_filter, events_topic, job_id_of
from trunkline_agent.wire.verdicts import ACCEPTED

NextSights = Callable[[float], list[Sight]]
"""A function that waits at most the given number of seconds for messages, and returns reports about them."""
READY_VARIABLE: Final = "TRUNKLINE_READY_FILE"
_LOOK_S: Final = 1.0
_LIST_LIMIT: Final = 1000
_WAITING: Final = 10_000
_NOTES: Final = Notes("watch")


def print_line(line: str) -> None:
    """Print a line on standard output, at once."""
    print(line, flush=True)


def watch(
    next_sights: NextSights,
    outcomes: Outcomes,
    timers: Timers,
    show: Callable[[str], object] = print_line,
    look: Callable[[], object] = lambda: None,
) -> int:
    """Show the accepted events of jobs until all jobs have ended or a time limit is reached.

    Notes go to standard error. Errors of the source are raised, as TrunklineError.

    Args:
        next_sights: The source of reports about the jobs' messages, as `mqtt_source` or `settled_source` yields
            it. It is called with the longest time to wait in seconds.
        outcomes: The jobs to follow, which records how they end.
        timers: The time limits.
        show: Called with each accepted event as a line of JSON.
        look: Called about once a second. An error of it ends the watch.

    Returns:
        0 if all jobs have completed, 1 if all have ended but not all have completed, 2 after a time limit.
    """
    while True:
        code = outcomes.exit_code()
        if code is not None:
            return code
        left_s = timers.left_s()
        if left_s <= 0:
            not_ended = ", ".join(outcomes.open_jobs()) or "none was seen"
            _NOTES.say(f"{timers.ran_out()}; not ended: {not_ended}")
            return EXIT_TIMED_OUT
        look()
        for sight in next_sights(min(left_s, _LOOK_S)):
            if not outcomes.follows(sight.job_id):
                continue
            shown = outcomes.take(sight)
            if shown.line is not None:
                show(shown.line)
                timers.restart_idle()
            if shown.note is not None:
                _NOTES.say(f"{shown.job_id}: {shown.note}")


@contextmanager
def mqtt_source(settings: Settings, jobs: list[str], outcomes: Outcomes) -> Iterator[NextSights]:
    """Subscribe to job events over MQTT, at the common broker and per-job brokers, and verify their signatures.

    Use it with `with`. It yields the function for `watch` that waits for the next message and returns reports
    about it; the list is empty if none came in time. Lost connections are made again, with a note on stderr.

    Args:
        settings: The settings of the brokers and of stored secrets.
        jobs: The jobs to follow; an empty list follows all jobs.
        outcomes: The record of the jobs. If `jobs` is empty, the jobs that are followed are added to it.

    Raises:
        NotFound: The secret of a job in `jobs` is not stored on this machine.
        Refused: The broker of a job in `jobs` refuses the login or the subscription.
        BackboneUnreachable: The broker of a job in `jobs` does not answer.
    """

    def watcher(job: str, secret: str) -> JobWatcher:
        return JobWatcher(settings, job, secret, lambda: kept_secrets(settings, job))

    watchers = {job: watcher(job, _secret(settings, job)) for job in jobs}
    unknown: set[str] = set()
    prefix = settings.mqtt.topic_prefix
    places = _brokers_of(settings, jobs) if jobs else _brokers_of_all(settings, stored_jobs(settings))

    def sights(message: Message) -> list[Sight]:
        job = job_id_of(prefix, message.topic)
        # An empty message removes a retained end; it is no event.
        if job is None or job in unknown or not message.payload:
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

    with _listening(places) as (next_message, followed):
        if not jobs:
            for job in followed:
                outcomes.take(Sight(job))

        is_asked = not jobs

        def next_sights(timeout_s: float) -> list[Sight]:
            nonlocal is_asked
            message = next_message(timeout_s)
            if message is not None:
                return sights(message)
            if is_asked:
                return []
            is_asked = True
            ended = _ended_before(settings, outcomes.open_jobs())
            # An event that the gateway has settled meanwhile is in the queue by now, or comes at once.
            last = next_message(_LOOK_S) if ended else None
            return [*([] if last is None else sights(last)), *ended]

        _ready()
        yield next_sights


@contextmanager
def settled_source(settings: Settings, jobs: list[str], outcomes: Outcomes) -> Iterator[NextSights]:
    """Follow the events of jobs that the gateway has settled, through its stream of events.

    Use it with `with`. It yields the function for `watch` that returns reports. The first call reports the
    current state of the jobs. A later call waits for the next event; its list is empty if none came in time.

    Args:
        settings: The settings, which name the gateway.
        jobs: The jobs to follow; an empty list follows all jobs.
        outcomes: The jobs that have not ended, which are looked up again when events were missed.

    Raises:
        NotFound: A job in `jobs` does not exist.
        BackboneUnreachable: The gateway does not answer at the start.
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


def _ended_before(settings: Settings, jobs: list[str]) -> list[Sight]:
    """Return the states of those jobs that have ended by the gateway's answer, if it answers.

    The broker keeps the end of a job for a limited time only.
    """
    found: list[Sight] = []
    with suppress(TrunklineError), reachable(settings) as gateway:
        for job in jobs:
            with suppress(NotFound):
                found += [sight for sight in _states(gateway, [job]) if sight.status in JOB_TERMINAL]
    return found


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


class _Listening(NamedTuple):
    """The topics and jobs to follow at one broker. An `optional` broker may be unreachable."""

    mqtt: MqttSettings
    topics: list[str]
    jobs: list[str]
    hint: str = ""
    optional: bool = False


def _brokers_of(settings: Settings, jobs: list[str]) -> list[_Listening]:
    """Return the brokers of named jobs.

    A job that the gateway cannot give a broker for is followed at our own broker, with a note. Raises
    TrunklineError for a stored broker that cannot be read.
    """
    kept = {job: find_broker(secret_path(settings, job), job) for job in jobs}
    named = _from_gateway(settings, [job for job in jobs if kept[job] is None])
    found: dict[MqttSettings, _Listening] = {}
    for job in jobs:
        broker = kept[job] or named.get(job) or JobBroker(None)
        mqtt = _as_listener(settings, broker.resolve(settings.mqtt))
        place = found.setdefault(mqtt, _Listening(mqtt, [], [], _hint(job) if broker.is_locked else ""))
        place.topics.append(events_topic(mqtt.topic_prefix, job))
        place.jobs.append(job)
    return list(found.values())


def _brokers_of_all(settings: Settings, stored: Iterable[str]) -> list[_Listening]:
    """Return our own broker for all jobs, and the own brokers of the jobs in `stored`."""
    prefix = settings.mqtt.topic_prefix
    ours = _Listening(role_mqtt(settings, DELEGATOR), [events_filter(prefix)], [])
    found: dict[MqttSettings, _Listening] = {}
    for job in stored:
        broker = find_broker(secret_path(settings, job), job)
        mqtt = settings.mqtt if broker is None else broker.resolve(settings.mqtt)
        if same_broker(mqtt, settings.mqtt):
            ours.jobs.append(job)
            continue
        # One attempt, because the brokers of old jobs may not exist any more, and the others wait.
        mqtt = mqtt.model_copy(update={"publish_attempts": 1})
        place = found.setdefault(mqtt, _Listening(mqtt, [], [], optional=True))
        place.topics.append(events_topic(prefix, job))
        place.jobs.append(job)
    return [ours, *found.values()]


@contextmanager
def _listening(
    places: list[_Listening],
) -> Iterator[tuple[Callable[[float], Message | None], list[str]]]:
    """Subscribe at all brokers. Yield a function that waits for the next message, and the followed jobs.

    Raises BackboneUnreachable, Refused or UsageError for a broker that is not optional.
    """
    found: queue.Queue[Message] = queue.Queue(_WAITING)
    jobs: list[str] = []

    def next_message(timeout_s: float) -> Message | None:
        with suppress(queue.Empty):
            return found.get(timeout=max(0.0, timeout_s))
        return None

    with ExitStack() as subscriptions:
        for place in places:
            tell = _NOTES.lost(f"MQTT broker {broker_name(place.mqtt)}")
            try:
                subscriptions.enter_context(EventSubscription(place.mqtt, place.topics, found, lost=tell))
            except (BackboneUnreachable, Refused, UsageError) as error:
                if not place.optional:
                    if place.hint and isinstance(error, Refused):
                        raise Refused(f"{error}; {place.hint}") from None
                    raise
                _NOTES.say(f"{error}; not followed there: {', '.join(place.jobs)}")
                continue
            jobs += place.jobs
        yield next_message, jobs


def _as_listener(settings: Settings, mqtt: MqttSettings) -> MqttSettings:
    """Return `mqtt` with our role's account if it is our broker; another broker must not get that account."""
    if not same_broker(mqtt, settings.mqtt):
        return mqtt
    return role_mqtt(settings.model_copy(update={"mqtt": mqtt}), DELEGATOR)


def _from_gateway(settings: Settings, jobs: list[str]) -> dict[str, JobBroker]:
    found: dict[str, JobBroker] = {}
    if not jobs:
        return found
    try:
        with reachable(settings) as gateway:
            for job in jobs:
                with suppress(NotFound):
                    found[job] = _opened(settings, gateway.get(path_of("jobs", job)).get("broker"))
    except TrunklineError as error:
        rest = ", ".join(job for job in jobs if job not in found)
        _NOTES.say(f"{error}. So it is not known whether {rest} has an MQTT broker of its own; following ours")
    return found


def _opened(settings: Settings, answer: Mapping[str, Any] | None) -> JobBroker:
    """Return the job's broker from the gateway, with its password if this process has the master key."""
    if answer is None:
        return JobBroker(None)
    try:
        overlay = BrokerOverlay.model_validate(answer)
    except ValidationError as error:
        raise TrunklineError(f"the gateway returned a broker with {error.error_count()} wrong fields") from None
    if overlay.sealed_password is None:
        return JobBroker(overlay)
    purpose = broker_password_purpose(overlay.host, overlay.port, overlay.username)
    # Without the key, try without the password; if the broker refuses, the error shows what to do.
    with suppress(SettingsError, UnsealError, UnicodeDecodeError):
        password = load_keyring(settings).open(overlay.sealed_password, purpose).decode("utf-8")
        return JobBroker(overlay, SecretStr(password))
    return JobBroker(overlay)


def _hint(job: str) -> str:
    return (
        f"the password of this broker, which is job {job}'s own, is known to the session that picked the job "
        "and, sealed, to who has the master key: watch there, or as operator with TRUNKLINE__MASTER_KEY or the "
        f"master key's file; 'trunkline watch --job {job} --settled' needs neither"
    )
