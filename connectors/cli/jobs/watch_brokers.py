"""Which MQTT brokers `trunkline watch` listens at, one for each own broker of its jobs (JE-13), and all as one.

A job's broker is known from what 'jobs register' and 'jobs pick' keep beside its secret, else from the gateway.
The gateway tells no password; sealed, it goes to who may read all brokers, and opens with the master key.
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
"""Makes, of a broker's name, the function that is told why its connection ended (None: there is one again)."""
_WAITING: Final = 10_000


class Listening(NamedTuple):
    """What is listened to at one broker. `optional`: without it there is still something to follow."""

    mqtt: MqttSettings
    topics: list[str]
    jobs: list[str]
    hint: str = ""
    optional: bool = False


def brokers_of(settings: Settings, jobs: list[str], say: Say) -> list[Listening]:
    """The brokers of jobs that are named. What the gateway does not tell is said, and looked for at our own
    broker. Raises TrunklineError for what is kept here and cannot be read.
    """
    kept = {job: find_broker(secret_path(settings, job), job) for job in jobs}
    told = _told_by_the_gateway(settings, [job for job in jobs if kept[job] is None], say)
    found: dict[MqttSettings, Listening] = {}
    for job in jobs:
        broker = kept[job] or told.get(job) or JobBroker(None)
        mqtt = _as_listener(settings, broker.resolve(settings.mqtt))
        place = found.setdefault(mqtt, Listening(mqtt, [], [], _hint(job) if _is_locked(broker) else ""))
        place.topics.append(events_topic(mqtt.topic_prefix, job))
        place.jobs.append(job)
    return list(found.values())


def brokers_of_all(settings: Settings, stored: Iterable[str]) -> list[Listening]:
    """Our own broker with all that it has, and the own brokers of the jobs that this machine keeps."""
    prefix = settings.mqtt.topic_prefix
    ours = Listening(role_mqtt(settings, DELEGATOR), [events_filter(prefix)], [])
    found: dict[MqttSettings, Listening] = {}
    for job in stored:
        broker = find_broker(secret_path(settings, job), job)
        mqtt = settings.mqtt if broker is None else broker.resolve(settings.mqtt)
        if same_broker(mqtt, settings.mqtt):
            ours.jobs.append(job)
            continue
        # One attempt: old jobs' brokers may be long gone, and the others wait.
        mqtt = mqtt.model_copy(update={"publish_attempts": 1})
        place = found.setdefault(mqtt, Listening(mqtt, [], [], optional=True))
        place.topics.append(events_topic(prefix, job))
        place.jobs.append(job)
    return [ours, *found.values()]


@contextmanager
def listening(
    places: list[Listening], lost: Lost, say: Say
) -> Iterator[tuple[Callable[[float], Message | None], list[str]]]:
    """Subscribe everywhere: what waits for the next message of them all, and the jobs that are listened to.

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
    """`mqtt` with our role's account, if it is our broker: another one has no business with that."""
    if not same_broker(mqtt, settings.mqtt):
        return mqtt
    return role_mqtt(settings.model_copy(update={"mqtt": mqtt}), DELEGATOR)


def _told_by_the_gateway(settings: Settings, jobs: list[str], say: Say) -> dict[str, JobBroker]:
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


def _opened(settings: Settings, told: Mapping[str, Any] | None) -> JobBroker:
    """The overlay as the gateway tells it; with its password when this process has the master key."""
    if told is None:
        return JobBroker(None)
    try:
        overlay = BrokerOverlay.model_validate(told)
    except ValidationError as error:
        raise TrunklineError(f"the gateway tells a broker with {error.error_count()} wrong fields") from None
    if overlay.sealed_password is None:
        return JobBroker(overlay)
    purpose = broker_password_purpose(overlay.host, overlay.port, overlay.username)
    # Without the key we try without the password, and say what to do when the broker refuses.
    with suppress(SettingsError, UnsealError, UnicodeDecodeError):
        password = load_keyring(settings).open(overlay.sealed_password, purpose).decode("utf-8")
        return JobBroker(overlay, SecretStr(password))
    return JobBroker(overlay)


def _is_locked(broker: JobBroker) -> bool:
    """Whether the broker may want a password that we do not know."""
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
