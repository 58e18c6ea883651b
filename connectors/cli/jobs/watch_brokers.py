"""The MQTT brokers of `trunkline watch`: ours, and the jobs' own brokers (JE-13), merged into one stream.

'jobs register' and 'jobs pick' store a job's broker beside its secret; for other jobs the gateway names it. The
gateway gives no password; operators get it sealed, and open it with the master key.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, NamedTuple

from pydantic import SecretStr, ValidationError

from connectors.agent_sdk.event_subscription import EventSubscription, Message
from connectors.gateway_client.gateway_client import path_of, reachable
from connectors.job_tools.job_brokers import JobBroker, find_broker
from connectors.job_tools.job_secrets import secret_path
from connectors.mqtt_link.broker_settings import broker_name, same_broker
from connectors.mqtt_link.mqtt_credentials import DELEGATOR, role_mqtt
from connectors.mqtt_link.topics import events_filter, events_topic
from schemas.errors import BackboneUnreachable, NotFound, Refused, TrunklineError
from schemas.keys.sealing import UnsealError, broker_password_purpose, load_keyring
from schemas.settings.settings import MqttSettings, Settings, SettingsError
from schemas.streams.job.job_registry import BrokerOverlay

Say = Callable[[str], object]
Lost = Callable[[str], Callable[[str | None], object]]
"""Returns, for a broker's name, a function that receives why its connection was lost; None: it is back."""
_WAITING: Final = 10_000


class Listening(NamedTuple):
    """The topics and jobs to follow at one broker. An `optional` broker may be unreachable."""

    mqtt: MqttSettings
    topics: list[str]
    jobs: list[str]
    hint: str = ""
    optional: bool = False


def brokers_of(settings: Settings, jobs: list[str], say: Say) -> list[Listening]:
    """Return the brokers of named jobs.

    A job that the gateway cannot give a broker for is followed at our own broker, with a note. Raises
    TrunklineError for a stored broker that cannot be read.
    """
    kept = {job: find_broker(secret_path(settings, job), job) for job in jobs}
    named = _from_gateway(settings, [job for job in jobs if kept[job] is None], say)
    found: dict[MqttSettings, Listening] = {}
    for job in jobs:
        broker = kept[job] or named.get(job) or JobBroker(None)
        mqtt = _as_listener(settings, broker.resolve(settings.mqtt))
        place = found.setdefault(mqtt, Listening(mqtt, [], [], _hint(job) if _is_locked(broker) else ""))
        place.topics.append(events_topic(mqtt.topic_prefix, job))
        place.jobs.append(job)
    return list(found.values())


def brokers_of_all(settings: Settings, stored: Iterable[str]) -> list[Listening]:
    """Return our own broker for all jobs, and the own brokers of the jobs in `stored`."""
    prefix = settings.mqtt.topic_prefix
    ours = Listening(role_mqtt(settings, DELEGATOR), [events_filter(prefix)], [])
    found: dict[MqttSettings, Listening] = {}
    for job in stored:
        broker = find_broker(secret_path(settings, job), job)
        mqtt = settings.mqtt if broker is None else broker.resolve(settings.mqtt)
        if same_broker(mqtt, settings.mqtt):
            ours.jobs.append(job)
            continue
        # One attempt, because the brokers of old jobs may not exist any more, and the others wait.
        mqtt = mqtt.model_copy(update={"publish_attempts": 1})
        place = found.setdefault(mqtt, Listening(mqtt, [], [], optional=True))
        place.topics.append(events_topic(prefix, job))
        place.jobs.append(job)
    return [ours, *found.values()]


@contextmanager
def listening(
    places: list[Listening], lost: Lost, say: Say
) -> Iterator[tuple[Callable[[float], Message | None], list[str]]]:
    """Subscribe at all brokers. Yield a function that waits for the next message, and the followed jobs.

    Raises BackboneUnreachable, Refused or SettingsError for a broker that is not optional.
    """
    found: queue.Queue[Message] = queue.Queue(_WAITING)
    jobs: list[str] = []

    def next_message(timeout_s: float) -> Message | None:
        with suppress(queue.Empty):
            return found.get(timeout=max(0.0, timeout_s))
        return None

    with ExitStack() as subscriptions:
        for place in places:
            tell = lost(f"MQTT broker {broker_name(place.mqtt)}")
            try:
                subscriptions.enter_context(EventSubscription(place.mqtt, place.topics, found, lost=tell))
            except (BackboneUnreachable, Refused, SettingsError) as error:
                if not place.optional:
                    if place.hint and isinstance(error, Refused):
                        raise Refused(f"{error}; {place.hint}") from None
                    raise
                say(f"{error}; not followed there: {', '.join(place.jobs)}")
                continue
            jobs += place.jobs
        yield next_message, jobs


def _as_listener(settings: Settings, mqtt: MqttSettings) -> MqttSettings:
    """Return `mqtt` with our role's account if it is our broker; another broker must not get that account."""
    if not same_broker(mqtt, settings.mqtt):
        return mqtt
    return role_mqtt(settings.model_copy(update={"mqtt": mqtt}), DELEGATOR)


def _from_gateway(settings: Settings, jobs: list[str], say: Say) -> dict[str, JobBroker]:
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
        say(f"{error}. So it is not known whether {rest} has an MQTT broker of its own; following ours")
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


def _is_locked(broker: JobBroker) -> bool:
    """Return whether the broker may require a password that we do not know."""
    overlay = broker.overlay
    return (
        overlay is not None
        and broker.password is None
        and (overlay.username is not None or overlay.sealed_password is not None)
    )


def _hint(job: str) -> str:
    return (
        f"the password of this broker, which is job {job}'s own, is known to the session that picked the job "
        "and, sealed, to who has the master key: watch there, or as operator with TRUNKLINE__MASTER_KEY or the "
        f"master key's file; 'trunkline watch --job {job} --settled' needs neither"
    )
