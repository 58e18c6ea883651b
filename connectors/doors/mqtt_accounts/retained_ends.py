"""A background service of the gateway that removes the retained ends of jobs from the stack's own Mosquitto.

The broker retains the last event of a job for subscribers that come later (JE-01). It keeps each one in memory
and writes all of them to disk again and again. So a retained end goes when the job's account goes.

**Reads** all retained events of the broker, and the jobs of the live view.
**Owns** nothing. It publishes an empty retained message for each retained event of a job that ended
`mqtt.account_grace_s` ago. The bridge takes that for no event.
**On restart** it begins with a look at all retained events, also those that are older than this service.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Final

import structlog
from paho.mqtt.client import MQTTMessage

from connectors.hub.live.live_view import LiveView
from connectors.plumbing.machine.background_service import ThreadedService
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.job.job_registry import JOB_TERMINAL, JobRow
from trunkline_agent.errors import TrunklineError
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.topics import events_filter, events_topic, job_id_of

log = structlog.stdlib.get_logger(__name__)

_EACH_S: Final = 60.0
_AT_LEAST_S: Final = 0.2
_SWEEP_S: Final = 60.0
# So many are removed in one look. If there are more, the next look follows at once.
_REMOVED_MOST: Final = 5_000


class RetainedEnds(ThreadedService):
    """Removes retained events of jobs that have ended, on a thread of its own. It looks once a minute.

    Args:
        settings: the broker, and `mqtt.account_grace_s`.
        view: the live view with the jobs.
    """

    def __init__(self, settings: Settings, view: LiveView) -> None:
        super().__init__("retained-ends")
        self._settings = settings
        self._view = view
        self._grace_us = settings.mqtt.account_grace_s * 1e6

    def _run(self) -> None:
        each_s = min(_EACH_S, max(_AT_LEAST_S, self._settings.mqtt.account_grace_s / 10))
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            pause_s = each_s
            try:
                if self.remove_old() >= _REMOVED_MOST:
                    pause_s = _AT_LEAST_S
            except (TrunklineError, SettingsError) as error:
                log.warning("retained_ends_not_read", error=str(error))
            except Exception:
                log.exception("retained_ends_failed")

    def remove_old(self) -> int:
        """Remove retained events of jobs that ended long enough ago, and return how many. Blocks.

        Raises BackboneUnreachable when the broker does not answer, and SettingsError for a wrong file of role
        passwords.
        """
        mqtt = role_mqtt(self._settings, OPERATOR)
        end_topic = f"{mqtt.topic_prefix}/bridge/retained-{secrets.token_hex(16)}"
        old, at_end = list[str](), threading.Event()

        def take(message: MQTTMessage) -> None:
            if message.topic == end_topic:
                at_end.set()
            elif message.retain and len(old) < _REMOVED_MOST:
                job_id = job_id_of(mqtt.topic_prefix, message.topic)
                if job_id is not None and self._is_old(job_id):
                    old.append(job_id)

        wanted = [Subscription(events_filter(mqtt.topic_prefix), qos=0), Subscription(end_topic)]
        connection = MqttConnection(mqtt, wanted, on_message=take)
        try:
            connection.open()
            # The broker has queued all retained messages when it takes this one.
            connection.publish_and_wait(end_topic, b"end")
            at_end.wait(_SWEEP_S)
            for job_id in old:
                connection.publish(events_topic(mqtt.topic_prefix, job_id), b"", qos=0, retain=True)
            if old:
                connection.publish_and_wait(end_topic, b"removed")
                log.info("retained_ends_removed", count=len(old))
            connection.close()
        finally:
            connection.drop()
        return len(old)

    def _is_old(self, job_id: str) -> bool:
        row = self._view.get(JobRow, job_id)
        return (
            row is not None
            and row.status in JOB_TERMINAL
            and (row.ended_at or 0) + self._grace_us <= time.time() * 1e6
        )
