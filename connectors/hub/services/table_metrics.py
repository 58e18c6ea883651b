"""Prometheus metrics of live view, ledger, view tables, disk and bridge, and of the stack's programs.

A thread reads the newest commits of the tables, at most every `_KEEP_S` seconds. A store that hangs delays a
scrape by `_WAIT_S`; then the tables are reported as down.

`BridgeWatch` follows the presence messages that the MQTT bridge publishes. It has one connection to the MQTT
broker of the settings, as operator. When the broker is unreachable or refuses the login, `trunkline_mqtt_up` is
0 and the state of the bridge has no sample. The connection is retried with growing pauses.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from paho.mqtt.client import MQTTMessage
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.row_lists import RowLists
from connectors.hub.live.table_progress_reader import (
    Lag,
    LedgerProgress,
    LedgerProgressReader,
    TableLag,
    ViewProgressReader,
)
from connectors.hub.services.mailbox_waits import MailboxWaits
from connectors.hub.services.mailboxes import MailboxIndex
from connectors.hub.serving.metrics import counters, gauge, gauges
from connectors.hub.serving.shares import ByteBudget
from connectors.plumbing.machine import state_file
from connectors.plumbing.machine.background_service import ThreadedService
from connectors.plumbing.machine.state_file import READY, STARTING, STOPPED, UNRESPONSIVE, WAITING
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from connectors.plumbing.mqtt_link.payloads import (
    DROPPED,
    FIGURES,
    HEAP_BYTES,
    STORED_BYTES,
    Presence,
    presence_topic,
    read_figure,
    read_presence,
    silence_s,
)
from connectors.plumbing.network.rates import Backoff
from schemas.fold.stream_kind import STOPPED as AGENT_STOPPED
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.agents.agent_registry import PARTICIPANT_STATES
from schemas.streams.mailboxes.message import MessageRow
from schemas.tables.view_progress import ViewProgress
from trunkline_agent.errors import BackboneUnreachable, TrunklineError, UsageError
from trunkline_agent.mqtt.mqtt_client import topic_of
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription

_KEEP_S: Final = 2.0
_WAIT_S: Final = 2.0
# A reading older than this is not reported.
_OLD_S: Final = 30.0
_PART_STATES: Final = (STARTING, READY, UNRESPONSIVE, WAITING, STOPPED)


# Only the deepest mailboxes have a sample of their own.
_MAILBOXES: Final = 200
# As many pairs of a mailbox and a reader with a long lease have one.
_LONG_LEASES: Final = 50


@dataclass(eq=False)
class StateMetrics(Collector):
    """A metrics collector that reads the live view at each scrape. Thread-safe.

    Attributes:
        unconfirmed_inboxes: Returns how many agents over MQTT do not confirm.
        long_lease_s: A reader that holds a message for longer than this is named.
    """

    live_view: LiveView
    lists: RowLists
    mailboxes: MailboxIndex
    waits: MailboxWaits
    answers: ByteBudget
    log_clock: LogClock
    unconfirmed_inboxes: Callable[[], int]
    long_lease_s: float

    def collect(self) -> Iterable[Metric]:
        """Yield the lag of live view and store, figures of mailboxes, clocks, and participants by status.

        Prometheus calls this method at each scrape.
        """
        yield _lag_records("live_view", "Records that the live view lags.", self.live_view.lag())
        unwritten, is_up = self.live_view.unwritten()
        yield gauge("state_store_unwritten", "Records that the gateway's state store lacks.", unwritten)
        yield gauge("state_store_up", "Whether the last write to the state store succeeded.", is_up)
        offset_s = self.log_clock.offset_us() / 1e6
        yield gauge("log_clock_offset_seconds", "The log's clock minus the gateway's.", offset_s)
        pending, _ = self.mailboxes.totals()
        yield gauge("mailbox_messages", "Messages that wait in all mailboxes.", pending)
        deepest = [found for found in self.mailboxes.deepest(_MAILBOXES) if found.depth]
        yield gauges(
            "mailbox_depth",
            f"Messages that wait in a mailbox, of the {_MAILBOXES} deepest.",
            ["mailbox"],
            ((["/".join(found.mailbox)], found.depth) for found in deepest),
        )
        yield gauge("mailbox_waits", "Requests that wait for a message.", self.waits.count())
        yield gauge("answer_memory_bytes", "Bytes of long answers under way.", self.answers.used)
        yield gauge("answer_memory_waits", "Long answers that wait for memory.", self.answers.waiting)
        text = "Agents over MQTT that get messages again and again and confirm none."
        yield gauge("mqtt_unconfirmed_agents", text, self.unconfirmed_inboxes())
        counts = Tally(row.status for row in self.lists.participants_with(None))
        counts[AGENT_STOPPED] = self.lists.participants.count([AGENT_STOPPED])
        states = (([status], counts[status]) for status in PARTICIPANT_STATES)
        yield gauges("agents", "Agents that take part, by status.", ["status"], states)
        yield from self._long_leases()

    def _long_leases(self) -> Iterable[Metric]:
        """Yield the number of messages that are held for too long, and for each reader the longest time."""
        now_us = self.log_clock.now_us()
        keys = self.mailboxes.long_held(now_us - round(self.long_lease_s * 1e6), now_us)
        yield gauge("long_leases", "Messages that readers hold for too long.", len(keys))
        longest: dict[tuple[str, str], float] = {}
        for key in keys:
            row = self.live_view.get(MessageRow, key)
            if row is not None and row.handed_at is not None and len(longest) < _LONG_LEASES:
                held_s = (now_us - row.handed_at) / 1e6
                longest.setdefault((f"{row.realm}/{row.recipient}", row.handed_to or ""), held_s)
        yield gauges(
            "long_lease_seconds",
            f"Seconds that a reader holds a message of a mailbox for too long, of the {_LONG_LEASES} longest.",
            ["mailbox", "reader"],
            longest.items(),
        )


class _Reading(NamedTuple):
    """One reading of the tables' logs. A field is None when its table is missing or cannot be read."""

    at: float
    ledger: LedgerProgress | None
    ledger_lag: Lag
    view_lag: Lag | None


class TableMetrics(Collector):
    """A metrics collector: how far the ledger and the view tables are behind the log. Thread-safe."""

    def __init__(self, settings: Settings, live_view: LiveView) -> None:
        self._live_view = live_view
        self._lag = TableLag(live_view)
        self._ledger = LedgerProgressReader(settings)
        self._views = ViewProgressReader(settings)
        self._reading: _Reading | None = None
        self._lock = threading.Lock()
        self._busy: threading.Thread | None = None

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of ledger and view tables. A table that cannot be read yields only `..._up 0`.

        Prometheus calls this method at each scrape. A thread reads the tables. The method waits at most two
        seconds for the thread; afterwards the tables count as unreadable.
        """
        found = self._newest()
        ledger = None if found is None else found.ledger
        yield gauge("ledger_up", "Whether the ledger's log can be read.", ledger is not None)
        if found is not None and ledger is not None:
            yield from _lag_figures("ledger", "the ledger", found.ledger_lag)
            yield CounterMetricFamily(
                "trunkline_ledger_records", "Records in the ledger, by its audit chain.", value=ledger.rows
            )
            if ledger.committed_at_s is not None:
                text = "When the newest micro-batch was committed."
                yield gauge("ledger_commit_timestamp_seconds", text, ledger.committed_at_s)
            if ledger.batch_s is not None:
                text = "How long the newest micro-batch took, to its commit."
                yield gauge("settle_batch_seconds", text, ledger.batch_s)
            if ledger.batch_rows is not None:
                yield gauge("settle_batch_records", "Records of the newest micro-batch.", ledger.batch_rows)
        view_lag = None if found is None else found.view_lag
        yield gauge("view_up", "Whether the log of the view tables can be read.", view_lag is not None)
        if view_lag is not None:
            yield from _lag_figures("view", "the view tables", view_lag)

    def _newest(self) -> _Reading | None:
        with self._lock:
            found, busy = self._reading, self._busy
            if found is not None and time.monotonic() - found.at < _KEEP_S:
                return found
            if busy is None or not busy.is_alive():
                busy = self._busy = threading.Thread(target=self._read, name="table-metrics", daemon=True)
                busy.start()
        busy.join(_WAIT_S)
        found = self._reading
        return found if found is not None and time.monotonic() - found.at < _OLD_S else None

    def _read(self) -> None:
        at, more = time.monotonic(), self._live_view.lag()
        self._lag.look({p: end + more.get(p, 0) for p, end in self._live_view.next_offsets().items()})
        ledger: LedgerProgress | None = None
        views: ViewProgress | None = None
        with suppress(TrunklineError):
            ledger = self._ledger.read()
        with suppress(TrunklineError):
            views = self._views.read()
        self._reading = _Reading(
            at,
            ledger,
            self._lag.behind({} if ledger is None else ledger.ends),
            None if views is None else self._lag.behind(views.offsets),
        )


@dataclass(eq=False)
class MachineMetrics(Collector):
    """A metrics collector: the data directory's disk space, and the states of the local stack's programs."""

    settings: Settings

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the disk and of the local stack's programs.

        Prometheus calls this method at each scrape. The metrics of programs are missing when no local stack
        uses this data directory.
        """
        try:
            disk = shutil.disk_usage(self.settings.data_path)
        except OSError:
            disk = None
        if disk is not None:
            yield gauge("data_dir_free_bytes", "Free space of the data directory's disk.", disk.free)
            yield gauge("data_dir_size_bytes", "Size of the data directory's disk.", disk.total)
        state = state_file.read_state(self.settings)
        if state is None:
            return
        is_alive = state_file.is_alive(state.get("supervisor"))
        yield gauge("supervisor_up", "Whether the local stack's supervisor runs.", is_alive)
        if is_alive:
            yield from _part_figures(state.get("parts", {}))


def _part_figures(parts: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    yield counters(
        "part_restarts",
        "How often the supervisor has started a part again.",
        ["part"],
        (([name], part["restarts"]) for name, part in parts.items()),
    )
    yield gauges(
        "part_state",
        "1 for the state that a part is in, 0 for the others.",
        ["part", "state"],
        (([name, state], part["state"] == state) for name, part in parts.items() for state in _PART_STATES),
    )


def _lag_figures(name: str, what: str, lag: Lag) -> Iterable[Metric]:
    yield _lag_records(name, f"Records of the log that {what} lack.", lag.records)
    text = f"How long ago the oldest record came into the log that {what} lack; 0 when none is missing."
    yield gauge(f"{name}_lag_seconds", text, lag.seconds)


def _lag_records(name: str, text: str, records: Mapping[int, int]) -> Metric:
    samples = (([str(partition)], count) for partition, count in sorted(records.items()))
    return gauges(f"{name}_lag_records", text, ["partition"], samples)


_PAUSE_S: Final = 1.0
_PAUSE_MOST_S: Final = 60.0
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.5


class BridgeWatch(ThreadedService, Collector):
    """A background service and metrics collector that shows whether the MQTT broker and bridge work.

    `open` starts a thread, and `close` ends it. The other methods may be called on any thread.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__("bridge-watch", _STOP_S)
        self._settings = settings
        self._is_connected = False
        self._seen: tuple[Presence, float] | None = None
        self._figures: dict[str, int] = {}

    def collect(self) -> Iterable[Metric]:
        """Yield the metric `trunkline_mqtt_up` and, while there is a connection, `trunkline_bridge_state`.

        It also yields the broker's own figures.

        `trunkline_mqtt_up` is 1 while this gateway is connected to the MQTT broker, else 0.
        `trunkline_bridge_state` is 1 while a bridge reports itself as active, else 0. Prometheus calls this
        method at each scrape.
        """
        text = "Whether this gateway is connected to the MQTT broker."
        yield gauge("mqtt_up", text, self._is_connected)
        yield from self._broker_metrics()
        if not self._is_connected:
            return
        mqtt, seen = self._settings.mqtt, self._seen
        is_active = seen is not None and seen[0].active and time.monotonic() - seen[1] <= silence_s(mqtt)
        text = "1 while a bridge with this name is active and shows itself, else 0."
        yield gauges("bridge_state", text, ["bridge"], [([mqtt.bridge_client_id], is_active)])

    def _broker_metrics(self) -> Iterable[Metric]:
        """Yield the broker's figures about itself. A figure that it does not publish has no sample."""
        figures = self._figures
        text = "Messages that the MQTT broker has dropped since its start."
        dropped: list[tuple[list[str], int]] = [([], figures[DROPPED])] if DROPPED in figures else []
        yield counters("mqtt_dropped_messages", text, [], dropped)
        for name, topic, text in (
            ("mqtt_stored_bytes", STORED_BYTES, "Bytes of the messages that the MQTT broker keeps."),
            ("mqtt_heap_bytes", HEAP_BYTES, "Memory that the MQTT broker uses."),
        ):
            yield gauges(name, text, [], [([], figures[topic])] if topic in figures else [])

    def _run(self) -> None:
        pauses = Backoff(_PAUSE_S, _PAUSE_MOST_S)
        while not self._closing.is_set():
            if self._follow():
                pauses.reset()
            self._closing.wait(pauses.next_s())

    def _follow(self) -> bool:
        """Follow the bridge over one connection until it is lost. Returns whether the broker accepted it."""
        topics = (presence_topic(self._settings.mqtt), *FIGURES)
        wanted = [Subscription(topic, qos=0, on_refused=lambda _reason: None) for topic in topics]
        try:
            mqtt = role_mqtt(self._settings, OPERATOR)
            connection = MqttConnection(mqtt, wanted, on_message=self._take)
        except (SettingsError, UsageError):
            return False
        try:
            connection.open()
            self._is_connected = True
            while not self._closing.is_set() and not connection.lost.wait(_LOOK_S):
                pass
        except BackboneUnreachable:
            return False
        finally:
            connection.drop()
            self._is_connected, self._seen, self._figures = False, None, {}
        return True

    def _take(self, message: MQTTMessage) -> None:
        topic = topic_of(message)
        if topic in FIGURES:
            figure = read_figure(bytes(message.payload))
            if figure is not None:
                self._figures[str(topic)] = figure
            return
        found = read_presence(bytes(message.payload))
        seen = None if self._seen is None else self._seen[0]
        # The delayed Last Will of a replaced bridge does not describe its replacement.
        if found is not None and (found.active or seen is None or found.bridge == seen.bridge):
            self._seen = (found, time.monotonic())
