"""Job events over MQTT for `trunkline watch`: a subscription, and which events are valid (JE-09, JE-22).

The subscription reconnects by itself and misses nothing.

**Delivers** each message at least once, in the broker's order, also those that came while the connection was
down: the broker keeps the session of this client id for ten minutes.
**Acknowledges when** the message is in this process's queue.
**Loses when** this process ends. The next one gets retained terminal events and new messages.

The subscriber settles each message with `schemas.streams.fold.settle`, as the backbone does, on stream state of
its own. That state begins with a registration made here from the job's stored secret. A rotation is added when
the secret was rotated.
"""

from __future__ import annotations

import json
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Self

from paho.mqtt.client import MQTTMessage

from connectors.doors.mqtt_bridge.bridge_records import job_event_record
from connectors.tools.job_tools.job_files import KeptSecrets
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.fold.stream_kind import COMPLETED
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import JOB_TERMINAL, JobRegistration, JobSecretRotation
from schemas.wire.record import OutgoingRecord, Record, oversized
from schemas.wire.wire_body import OVERLAP_LIMIT_MS
from trunkline_agent.broker import broker_name
from trunkline_agent.errors import BackboneUnreachable, Refused
from trunkline_agent.mqtt.mqtt_client import well_formed_traceparent
from trunkline_agent.mqtt.mqtt_connection import (
    FINAL_REASONS,
    RETAINED_ONCE,
    BrokerRefused,
    MqttConnection,
    Subscription,
    backoff_s,
)
from trunkline_agent.wire.strict_json import decode
from trunkline_agent.wire.verdicts import ACCEPTED, BAD_SIGNATURE

SESSION_EXPIRY_S: Final = 600
_TICK_S: Final = 0.25
_STOP_S: Final = 5.0


class Message(NamedTuple):
    """One MQTT message that came in a subscription.

    Attributes:
        topic: The topic that it was published on.
        payload: Its bytes.
        traceparent: The W3C trace context that its sender gave; None without a well-formed one.
        retained: Whether the broker had kept it as a retained message from before the subscription.
    """

    topic: str
    payload: bytes
    traceparent: str | None
    retained: bool


class EventSubscription:
    """A subscription to MQTT topics that reconnects by itself. Use it as a context manager.

    Entering connects and starts a thread. It raises BackboneUnreachable when the broker does not answer in any
    of `mqtt.publish_attempts` attempts, and Refused when the broker forbids reading. Leaving the `with` block
    ends the thread and the subscription.

    Args:
        mqtt: The settings of the broker and of the attempts.
        topics: The topics to subscribe to, which may have wildcards.
        found: The queue into which the messages go. While it is full, the broker keeps further messages.
        lost: Called on the thread with the reason when a connection ends, and with None when there is a new
            one.
    """

    def __init__(
        self,
        mqtt: MqttSettings,
        topics: Sequence[str],
        found: queue.Queue[Message],
        *,
        lost: Callable[[str | None], object],
    ) -> None:
        self._mqtt = mqtt
        self._topics = topics
        self._report = lost
        self._client_id = f"trunkline-watch-{secrets.token_hex(16)}"
        self._found = found
        self._closed = threading.Event()
        self._connection: MqttConnection | None = None
        self._thread = threading.Thread(target=self._stay_connected, name="subscription", daemon=True)

    def __enter__(self) -> Self:
        mqtt = self._mqtt
        for attempt in range(1, mqtt.publish_attempts + 1):
            try:
                self._connection = self._connect()
                break
            except BackboneUnreachable:
                if attempt == mqtt.publish_attempts:
                    raise
                time.sleep(backoff_s(mqtt, attempt - 1))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.give_up("closed")
        self._thread.join(_STOP_S)
        if self._connection is not None:
            self._connection.close(forget_session=True)

    def _stay_connected(self) -> None:
        failures = 0
        while not self._closed.is_set():
            connection = self._connection
            if connection is not None:
                connection.lost.wait()
                if self._closed.is_set():
                    return
                self._report(connection.why)
                connection.drop()
                self._connection = None
            try:
                self._connection = self._connect()
                failures = 0
                self._report(None)
            except (BackboneUnreachable, Refused):
                self._closed.wait(backoff_s(self._mqtt, failures))
                failures += 1

    def _connect(self) -> MqttConnection:
        connection = MqttConnection(
            self._mqtt,
            [Subscription(topic, retain_handling=RETAINED_ONCE) for topic in self._topics],
            client_id=self._client_id,
            session_expiry_s=SESSION_EXPIRY_S,
            on_message=self._take,
        )
        try:
            connection.open()
        except BrokerRefused as error:
            if error.code.value in FINAL_REASONS:
                name = broker_name(self._mqtt)
                raise Refused(f"MQTT broker {name} refuses reading job events: {error.code}") from None
            raise
        return connection

    def _take(self, message: MQTTMessage) -> None:
        traceparent = well_formed_traceparent(message.properties)
        found = Message(message.topic, bytes(message.payload), traceparent, bool(message.retain))
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._found.put(found, timeout=_TICK_S)
                return


EXIT_COMPLETED: Final = 0
EXIT_FAILED: Final = 1
EXIT_TIMED_OUT: Final = 2
_KEY_BYTES: Final = 32


class Sight(NamedTuple):
    """A report about one message of a job.

    Attributes:
        job_id: The job.
        status: The job's status after the message, such as `running`; None if the message is no accepted event.
        line: An accepted event as a line of JSON to print; None for any other message.
        note: A text for the user, such as the reason of a rejection; None if there is nothing to say.
        before: Whether the job had ended before the watch began.
    """

    job_id: str
    status: str | None = None
    line: str | None = None
    note: str | None = None
    before: bool = False


class JobWatcher:
    """The fold for the events of one job, in a subscriber that does not trust the MQTT broker.

    Args:
        settings: The settings of MQTT and of limits.
        job_id: The job.
        secret: The job's secret, with which signatures are verified.
        kept: Returns the secrets that are stored on this machine for the job now, or None if there are none. It
            is called again when a signature does not fit, because the secret may have been rotated.
    """

    def __init__(
        self,
        settings: Settings,
        job_id: str,
        secret: str,
        kept: Callable[[], KeptSecrets | None] = lambda: None,
    ) -> None:
        self.job_id = job_id
        self._prefix = settings.mqtt.topic_prefix
        self._limit = settings.limits.payload_bytes
        # The secret is sealed and opened only here, so the backbone's master key is not needed.
        self._keyring = Keyring({"watch": secrets.token_bytes(_KEY_BYTES)}, "watch")
        self._entries = Entries()
        self._offset = 0
        self._kept = kept
        found = kept() or KeptSecrets(secret)
        self._secret = found.former or secret
        self._settle(
            JobRegistration(
                sealed_secret=self._keyring.seal(self._secret.encode(), job_secret_purpose(job_id)),
                job_id=job_id,
                description="",
            ).record(door="cli", principal="operator")
        )
        self._rotate(KeptSecrets(secret, found.former, found.former_ends_at))

    def settle(self, topic: str, payload: bytes, traceparent: str | None = None) -> Settled:
        """Settle one MQTT message, and return the fold's verdict on it. The watcher's state of the job changes.

        An invalid message raises nothing: its verdict is `rejected`, with a reason.

        Args:
            topic: The topic that the message came on.
            payload: The bytes of the message.
            traceparent: The W3C trace context of the message, or None.
        """
        record = job_event_record(self._prefix, topic, payload, traceparent)
        settled = self._settle(record)
        if settled.reason == BAD_SIGNATURE and self._rotate(self._kept()):
            return self._settle(record)
        return settled

    def _rotate(self, found: KeptSecrets | None) -> bool:
        """Continue with the secret that is stored now. Returns whether it is another one."""
        if found is None or found.secret == self._secret:
            return False
        # The backbone gave the time of expiry. By the log's clock that may be a little earlier or later.
        left_ms = round((found.former_ends_at - time.time()) * 1000)
        overlap_ms = max(0, min(left_ms, OVERLAP_LIMIT_MS)) if found.former == self._secret else 0
        request_id = f"r{self._offset}"
        self._secret = found.secret
        self._settle(
            JobSecretRotation(
                sealed_secret=self._keyring.seal(found.secret.encode(), job_secret_purpose(self.job_id)),
                job_id=self.job_id,
                overlap_ms=overlap_ms,
                request_id=request_id,
            ).record(door="cli", principal="operator")
        )
        return True

    def see(self, topic: str, payload: bytes, traceparent: str | None = None) -> Sight:
        """Settle one MQTT message, and return a report for the user of `trunkline watch`. It raises nothing.

        An accepted event gives the job's status and a line of JSON with secrets masked. A duplicate or rejected
        one gives a note with the reason.

        Args:
            topic: The topic that the message came on.
            payload: The bytes of the message.
            traceparent: The W3C trace context of the message, or None.
        """
        settled = self.settle(topic, payload, traceparent)
        if settled.verdict != ACCEPTED:
            why = settled.verdict if settled.reason is None else f"{settled.reason}: {settled.why}"
            seq = "" if settled.seq is None else f" with seq {settled.seq}"
            return Sight(self.job_id, note=f"an event{seq} does not count: {why}")
        # ASCII only, so that the line cannot control a terminal.
        line = json.dumps(decode(settled.shown or payload)[0], separators=(",", ":"))
        return Sight(self.job_id, settled.status_after, line)

    def _settle(self, outgoing: OutgoingRecord) -> Settled:
        record = oversized(outgoing, self._limit)
        headers = record.headers()
        names, values = tuple(name for name, _ in headers), tuple(value for _, value in headers)
        moment_us = time.time_ns() // 1000
        local = Record("watch", 0, self._offset, moment_us, record.key, record.value, names, values)
        self._offset += 1
        # An event needs no MAC, because the job's agent signs it.
        return settle(local, self._entries, self._keyring, Entries())


class Outcomes:
    """The jobs that a watch follows and their last known status, which decide its end and exit code (JE-21).

    Args:
        jobs: The ids of the jobs to follow.
        open_ended: Whether to follow also any other job, from its first event on.
    """

    def __init__(self, jobs: Iterable[str], *, open_ended: bool = False) -> None:
        self._status: dict[str, str | None] = dict.fromkeys(jobs)
        self._open_ended = open_ended

    def follows(self, job_id: str) -> bool:
        """Return whether the watch follows the job `job_id`."""
        return self._open_ended or job_id in self._status

    def take(self, sight: Sight) -> Sight:
        """Record the status of a job from a report, and return the report to show to the user.

        `sight` is a report that `JobWatcher.see` returned. Usually the same report is returned. After a job's
        end, later events of the job are not printed: the returned report has a note instead of a line.
        """
        known = self._status.get(sight.job_id)
        if sight.before and self._open_ended and known is None:
            self._status.pop(sight.job_id, None)
            return sight
        if known in JOB_TERMINAL:
            if sight.line is None and sight.status == known:
                return sight._replace(note=None)
            note = sight.note or f"an event after its end ({known}) is ignored"
            return sight._replace(line=None, note=note)
        self._status[sight.job_id] = sight.status or known
        return sight

    def exit_code(self) -> int | None:
        """Return the exit code of the watch, or None if the watch must go on.

        It is 0 if all jobs have completed, and 1 if all have ended but not all have completed. It is None while
        a job has not ended, or while no job is known.
        """
        if not self._status or any(status not in JOB_TERMINAL for status in self._status.values()):
            return None
        return EXIT_COMPLETED if set(self._status.values()) == {COMPLETED} else EXIT_FAILED

    def open_jobs(self) -> list[str]:
        """Return the sorted ids of the followed jobs whose end was not seen yet."""
        return sorted(job for job, status in self._status.items() if status not in JOB_TERMINAL)


class Timers:
    """The two time limits of a watch (JE-21), in seconds. Both begin when the object is created.

    Nothing here waits: the caller waits at most `left_s` seconds and then calls `left_s` again.

    Args:
        timeout_s: The longest time of the whole watch; None for no limit.
        idle_timeout_s: The longest time without an accepted event; None for no limit.
    """

    def __init__(self, timeout_s: float | None, idle_timeout_s: float | None) -> None:
        self._idle_s = math.inf if idle_timeout_s is None else idle_timeout_s
        self._total_s = math.inf if timeout_s is None else timeout_s
        self._started = self._last = time.monotonic()

    def restart_idle(self) -> None:
        """Begin the idle time anew. Call this after each accepted event."""
        self._last = time.monotonic()

    def left_s(self) -> float:
        """Return the seconds until the first time limit; infinite without limits, 0 or less after a limit."""
        return min(self._started + self._total_s, self._last + self._idle_s) - time.monotonic()

    def ran_out(self) -> str:
        """Return a text for the user that names the reached time limit. Call it when `left_s` is 0 or less."""
        over = time.monotonic() >= self._started + self._total_s
        return f"the time of {self._total_s:g} s ran out" if over else f"no event for {self._idle_s:g} s"
