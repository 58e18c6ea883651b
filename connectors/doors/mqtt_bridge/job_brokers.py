"""The bridges to per-job brokers, which are MQTT brokers that live jobs name for their events (JE-13).

Settings, log events and the gateway call such a broker an overlay, because it is laid over the settings.

**Reads** `GET /api/hub/brokers` of the gateway. While the gateway does not answer, nothing changes.
**Guarantees** that a broker that is down, or refuses the bridge, delays no other broker: each one has a thread,
a publisher and a back-off of its own. A bridge ends `mqtt.overlay_linger_s` after the end of the last live job
that names its broker, and not before all its messages are acknowledged.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import ValidationError

from connectors.doors.mqtt_bridge.broker_bridge import BrokerBridge
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream
from connectors.plumbing.mqtt_link.broker_settings import resolve_mqtt, same_broker
from schemas.keys.sealing import UnsealError, broker_password_purpose, load_keyring
from schemas.settings.settings import MqttSettings, Settings, SettingsError
from schemas.streams.job.job_registry import BrokerOverlay, broker_digest
from trunkline_agent.broker import broker_name
from trunkline_agent.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

BROKERS_PATH: Final = "/api/hub/brokers"
# Each costs a thread, a producer and up to two connections, and any client that may register jobs may name one.
BRIDGE_LIMIT: Final = 64
_TOO_MANY: Final = "too many"
_END_S: Final = 15.0
_REST_MOST_S: Final = 300.0


@dataclass
class _Running:
    """A bridge, and since when no live job names its broker (None: a live job names it)."""

    mqtt: MqttSettings
    stop: threading.Event
    bridge: BrokerBridge
    thread: threading.Thread
    unnamed_since: float | None = None


@dataclass(frozen=True)
class _Failure:
    """How often a bridge has ended by itself, and when it may start again (monotonic seconds)."""

    count: int
    rest_until: float


class JobBrokerBridges:
    """A bridge for each per-job broker that the gateway names, each on a thread of its own.

    Setting the event `stop` ends `run`. `verdicts` supplies the verdicts for the receipts of all bridges; the
    caller starts and closes it.
    """

    def __init__(self, settings: Settings, stop: threading.Event, verdicts: VerdictStream) -> None:
        self._settings = settings
        self._stop = stop
        self._verdicts = verdicts
        self._running: dict[MqttSettings, _Running] = {}
        self._failures: dict[MqttSettings, _Failure] = {}
        self._complaints: dict[str, str] = {}  # the last warning about the gateway ("") and each broker

    def run(self) -> None:
        """Start and stop bridges as live jobs need them: ask the gateway every `mqtt.overlay_poll_s` seconds.

        While the gateway does not answer, the running bridges stay. Blocks until `stop` is set. It then stops
        all bridges and waits for them, at most 15 s.
        """
        while not self._stop.is_set():
            try:
                self._look()
            except Exception:  # a bug must not end all the following rounds
                log.exception("overlays_failed")
            self._stop.wait(self._settings.mqtt.overlay_poll_s)
        for running in self._running.values():
            running.stop.set()
        deadline = time.monotonic() + _END_S
        for running in self._running.values():
            running.thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        try:
            with GatewayClient(self._settings) as gateway:
                overlays = list(map(str, gateway.get_all(BROKERS_PATH, "brokers", broker_digest)["brokers"]))
        except (TrunklineError, KeyError, TypeError) as error:
            self._complain("", str(error))
            return
        known = {*overlays, _TOO_MANY}
        self._complaints = {text: why for text, why in self._complaints.items() if text in known}
        wanted = {mqtt for text in overlays if (mqtt := self._resolved(text)) is not None}
        self._failures = {mqtt: failure for mqtt, failure in self._failures.items() if mqtt in wanted}
        for mqtt in wanted - self._running.keys():
            if mqtt not in self._failures or time.monotonic() >= self._failures[mqtt].rest_until:
                self._begin(mqtt)
        for mqtt, running in list(self._running.items()):
            if mqtt in wanted:
                running.unnamed_since = None
            else:
                self._let_go(running)
            if not running.thread.is_alive():
                del self._running[mqtt]  # if it is still wanted, a later round starts it again
                if not running.stop.is_set():
                    self._note_failure(mqtt)

    def _resolved(self, text: str) -> MqttSettings | None:
        """Return the settings of a job's broker, None for the bridge's own broker and for an unusable one."""
        try:
            overlay = BrokerOverlay.model_validate_json(text)
            password = None
            if overlay.sealed_password is not None:
                purpose = broker_password_purpose(overlay.host, overlay.port, overlay.username)
                password = load_keyring(self._settings).open(overlay.sealed_password, purpose).decode("utf-8")
            mqtt = resolve_mqtt(self._settings.mqtt, overlay, password)
        except (TrunklineError, SettingsError, UnsealError, UnicodeDecodeError) as error:
            self._complain(text, f"{type(error).__name__}: {error}")
            return None
        except ValidationError as error:
            self._complain(text, f"{error.error_count()} wrong fields")
            return None
        return None if same_broker(mqtt, self._settings.mqtt) else mqtt

    def _note_failure(self, mqtt: MqttSettings) -> None:
        """Start the pause of a bridge that has ended by itself. It grows: the reason may be permanent."""
        count = self._failures[mqtt].count + 1 if mqtt in self._failures else 1
        rest_s = min(self._settings.mqtt.overlay_poll_s * 2**count, _REST_MOST_S)
        self._failures[mqtt] = _Failure(count, time.monotonic() + rest_s)

    def _begin(self, mqtt: MqttSettings) -> None:
        if len(self._running) >= BRIDGE_LIMIT:
            self._complain(_TOO_MANY, f"more than {BRIDGE_LIMIT} brokers of live jobs; some have no bridge")
            return
        stop = threading.Event()
        own = self._settings.model_copy(update={"mqtt": mqtt})
        bridge = BrokerBridge(own, stop, self._verdicts, broker=broker_name(mqtt))
        name = f"bridge {broker_name(mqtt)}"
        thread = threading.Thread(target=self._run, args=(bridge, mqtt), name=name, daemon=True)
        self._running[mqtt] = _Running(mqtt, stop, bridge, thread)
        log.info("overlay_begins", broker=broker_name(mqtt))
        thread.start()

    def _run(self, bridge: BrokerBridge, mqtt: MqttSettings) -> None:
        try:
            bridge.run()
        except (TrunklineError, SettingsError) as error:
            log.error("overlay_failed", broker=broker_name(mqtt), error=str(error))
        except Exception:
            log.exception("overlay_failed", broker=broker_name(mqtt))
        finally:
            log.info("overlay_ended", broker=broker_name(mqtt), **bridge.tally.snapshot())

    def _let_go(self, running: _Running) -> None:
        now = time.monotonic()
        if running.unnamed_since is None:
            running.unnamed_since = now
        if (
            now - running.unnamed_since >= self._settings.mqtt.overlay_linger_s
            and not running.bridge.unacknowledged
        ):
            running.stop.set()

    def _complain(self, text: str, error: str) -> None:
        """Log a fault of a job's broker, or of the gateway (`text` empty), once and not in each round."""
        if self._complaints.get(text) != error:
            self._complaints[text] = error
            log.warning("overlay_unusable" if text else "overlays_unknown", error=error)
