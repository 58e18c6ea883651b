"""The brokers of live jobs that name their own (JE-13): the bridge keeps one connection for each of them.

**Reads** `GET /api/hub/brokers` of the gateway; while there is no answer, what is known stays as it is.
**Guarantees** that a broker that is down, or refuses us, holds up nobody else: each has a thread, a publisher
and a back-off of its own. A connection ends `mqtt.overlay_linger_s` after the last live job with it has ended,
and not before its window is empty.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import ValidationError

from connectors.gateway_client.gateway_client import GatewayClient
from connectors.mqtt_bridge.bridge_broker import BrokerBridge
from connectors.mqtt_bridge.verdict_stream import VerdictStream
from connectors.mqtt_link.broker_settings import resolve_mqtt, same_broker
from connectors.mqtt_link.mqtt_connection import broker_name
from schemas.errors import TrunklineError
from schemas.keys.sealing import UnsealError, broker_password_purpose, load_keyring
from schemas.settings.settings import MqttSettings, Settings, SettingsError
from schemas.streams.job.job_registry import BrokerOverlay

log = structlog.stdlib.get_logger(__name__)

BROKERS_PATH: Final = "/api/hub/brokers"
# Each is a thread, a producer and up to two connections, and whoever may register jobs may name brokers.
OVERLAYS_MOST: Final = 64
_TOO_MANY: Final = "too many"
_END_S: Final = 15.0
_REST_MOST_S: Final = 300.0


@dataclass
class _Kept:
    """One overlay's bridge, and since when no live job names it (None: one does)."""

    mqtt: MqttSettings
    stop: threading.Event
    bridge: BrokerBridge
    thread: threading.Thread
    unnamed_since: float | None = None


@dataclass(frozen=True)
class _Failure:
    """How often a bridge has ended by itself, and until when it is not begun again (monotonic seconds)."""

    count: int
    rest_until: float


class OverlayBridges:
    """Starts and ends bridges as the gateway names overlays. `run` it on a thread; it returns after `stop`."""

    def __init__(self, settings: Settings, stop: threading.Event, verdicts: VerdictStream) -> None:
        self._settings = settings
        self._stop = stop
        self._verdicts = verdicts
        self._kept: dict[MqttSettings, _Kept] = {}
        self._failures: dict[MqttSettings, _Failure] = {}
        self._complaints: dict[str, str] = {}  # what was said last of the gateway ("") and of each overlay

    def run(self) -> None:
        """Look every `mqtt.overlay_poll_s` seconds until stopped; then end all connections in order."""
        while not self._stop.is_set():
            try:
                self._look()
            except Exception:  # a fault of ours in one look must not end all the following
                log.exception("overlays_failed")
            self._stop.wait(self._settings.mqtt.overlay_poll_s)
        for kept in self._kept.values():
            kept.stop.set()
        deadline = time.monotonic() + _END_S
        for kept in self._kept.values():
            kept.thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        try:
            with GatewayClient(self._settings) as gateway:
                overlays = list(map(str, gateway.get(BROKERS_PATH)["brokers"]))
        except (TrunklineError, KeyError, TypeError) as error:
            self._complain("", str(error))
            return
        known = {*overlays, _TOO_MANY}
        self._complaints = {text: said for text, said in self._complaints.items() if text in known}
        wanted = {mqtt for text in overlays if (mqtt := self._resolved(text)) is not None}
        self._failures = {mqtt: failure for mqtt, failure in self._failures.items() if mqtt in wanted}
        for mqtt in wanted - self._kept.keys():
            if mqtt not in self._failures or time.monotonic() >= self._failures[mqtt].rest_until:
                self._begin(mqtt)
        for mqtt, kept in list(self._kept.items()):
            if mqtt in wanted:
                kept.unnamed_since = None
            else:
                self._let_go(kept)
            if not kept.thread.is_alive():
                del self._kept[mqtt]  # if it is still wanted, a later look begins it anew
                if not kept.stop.is_set():
                    self._note_failure(mqtt)

    def _resolved(self, text: str) -> MqttSettings | None:
        """The broker of an overlay; None for the bridge's own broker and for what cannot be used."""
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
        """Let a bridge that has ended by itself rest, longer each time: what ends it may be there for ever."""
        count = self._failures[mqtt].count + 1 if mqtt in self._failures else 1
        rest_s = min(self._settings.mqtt.overlay_poll_s * 2**count, _REST_MOST_S)
        self._failures[mqtt] = _Failure(count, time.monotonic() + rest_s)

    def _begin(self, mqtt: MqttSettings) -> None:
        if len(self._kept) >= OVERLAYS_MOST:
            self._complain(_TOO_MANY, f"more than {OVERLAYS_MOST} brokers of live jobs; some have no bridge")
            return
        stop = threading.Event()
        bridge = BrokerBridge(self._settings.model_copy(update={"mqtt": mqtt}), stop, self._verdicts)
        name = f"bridge {broker_name(mqtt)}"
        thread = threading.Thread(target=self._run, args=(bridge, mqtt), name=name, daemon=True)
        self._kept[mqtt] = _Kept(mqtt, stop, bridge, thread)
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

    def _let_go(self, kept: _Kept) -> None:
        now = time.monotonic()
        if kept.unnamed_since is None:
            kept.unnamed_since = now
        if now - kept.unnamed_since >= self._settings.mqtt.overlay_linger_s and not kept.bridge.unacknowledged:
            kept.stop.set()

    def _complain(self, text: str, error: str) -> None:
        """Log what is wrong with an overlay, or with the gateway (`text` empty), once and not at each look."""
        if self._complaints.get(text) != error:
            self._complaints[text] = error
            log.warning("overlay_unusable" if text else "overlays_unknown", error=error)
