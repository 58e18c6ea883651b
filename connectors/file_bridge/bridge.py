"""The bridge's loop from the files to the mailboxes: sessions, broadcasts for those who came later, polls.

**Delivers** each line at least once to each recipient's mailbox, under the message's own id, so it counts once.
**Acknowledges** (moves its cursor) when Kafka has the records.
**Loses when** a line is expired and compacted away before the bridge has seen it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog
import watchfiles

from connectors.file_bridge.mailbox_reader import known_messages
from connectors.file_bridge.poll_audit import read_polls
from connectors.file_bridge.progress import Progress
from connectors.file_bridge.queue_root import queue_root
from connectors.file_bridge.records import claims_of
from connectors.file_bridge.session_carrier import SessionCarrier
from connectors.file_queue import QueueError
from connectors.file_queue.message_record import is_name
from connectors.publisher import Publisher, RecordRefused
from schemas.errors import BackboneUnreachable
from schemas.event_topic import check_topic
from schemas.message import DEFAULT_REALM
from schemas.record import OutgoingRecord
from schemas.settings import Settings

log = structlog.stdlib.get_logger(__name__)

_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_ACK_GRACE_S: Final = 5.0
# The hint is believed after this; the look itself is the truth.
_DEBOUNCE_MS: Final = 20
_STEP_MS: Final = 10


class Consumers:
    """Who reads by file, by session; one thread changes, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_session: dict[str, frozenset[str]] = {}

    def replace(self, by_session: dict[str, frozenset[str]]) -> None:
        """Note who they are now."""
        with self._lock:
            self._by_session = by_session

    def all(self) -> list[tuple[str, str]]:
        """Session and name of each."""
        with self._lock:
            return [(session, name) for session, names in self._by_session.items() for name in names]

    def has(self, session: str, name: str) -> bool:
        """Whether somebody of this name reads in this session."""
        with self._lock:
            return name in self._by_session.get(session, ())


class FileBridge:
    """Carries until `stop` is set. `agents` gives the names of the registered agents; `ready` is called after
    each look that went well.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        consumers: Consumers,
        agents: Callable[[], frozenset[str]] = frozenset,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._root = str(queue_root(settings))
        self._stop = stop
        self._consumers = consumers
        self._agents = agents
        self._ready = ready
        self._progress_file = settings.data_path / "file_bridge" / "progress.json"
        self._progress = Progress.load(self._progress_file)
        self._publisher: Publisher | None = None

    def run(self) -> None:
        """Raises TrunklineError when the topic does not fit the settings."""
        failures = 0
        try:
            while not self._stop.is_set():
                try:
                    self.look()
                    self._ready()
                    failures = 0
                    self._wait()
                except (BackboneUnreachable, QueueError, OSError) as error:
                    log.warning("waits", why=str(error))
                    self._stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                    failures += 1
        finally:
            self._end_publisher()

    def look(self) -> None:
        """Carry what is there now. Raises BackboneUnreachable, QueueError."""
        # The polls first: what they have taken is in the files by then, and is carried before it is claimed.
        polls = read_polls(self._root, self._progress.audit)
        carriers = {name: self._carrier(name) for name in self._sessions()}
        found = {name: frozenset(carrier.consumers()) for name, carrier in carriers.items()}
        self._consumers.replace(found)
        for name, carrier in carriers.items():
            self._carry(name, carrier, found[name] | (self._agents() if name == DEFAULT_REALM else frozenset()))
        self._append([claim for poll in polls.polls for claim in claims_of(poll)])
        if polls.place != self._progress.audit:
            self._progress.audit = polls.place
            self._progress.save(self._progress_file)

    def _carry(self, session: str, carrier: SessionCarrier, consumers: frozenset[str]) -> None:
        served = self._progress.served.get(session, set())
        late = sorted(consumers - served)
        if late:
            carrier.carry_broadcasts(late)
            self._progress.served[session] = served | consumers
            self._progress.save(self._progress_file)
        lines = carrier.carry_new(sorted(served | consumers))
        if lines:
            log.info("carried", session=session, lines=lines)

    def _carrier(self, session: str) -> SessionCarrier:
        def known(realm: str, message_ids: Sequence[str]) -> set[tuple[str, str]]:
            return known_messages(self._settings, realm, message_ids)

        return SessionCarrier(self._root, session, self._append, known)

    def _sessions(self) -> list[str]:
        try:
            with os.scandir(f"{self._root}/sessions") as entries:
                return sorted(entry.name for entry in entries if is_name(entry.name) and entry.is_dir())
        except FileNotFoundError:
            return []

    def _append(self, records: Sequence[OutgoingRecord]) -> None:
        """Append and wait for Kafka. Raises BackboneUnreachable."""
        publisher = self._live_publisher()
        waiting = [(record, publisher.append(record)) for record in records]
        timeout_s = self._settings.kafka.delivery_timeout_s + _ACK_GRACE_S
        for record, append in waiting:
            try:
                append.result(timeout_s)
            except RecordRefused as error:
                log.warning("record_refused", stream=record.stream, ce_id=record.ce_id, why=str(error))
                self._live_publisher().append_cut(record).result(timeout_s)

    def _live_publisher(self) -> Publisher:
        if self._publisher is not None and self._publisher.failed:
            self._end_publisher()
        if self._publisher is None:
            check_topic(self._settings)
            self._publisher = Publisher(self._settings)
        return self._publisher

    def _end_publisher(self) -> None:
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close(_ACK_GRACE_S)

    def _wait(self) -> None:
        """Until something may have changed, or for the time after which it is looked at anyway."""
        poll_s = self._settings.files.poll_s
        if not Path(self._root).is_dir():
            self._stop.wait(poll_s)
            return
        began = time.monotonic()
        try:
            for _ in watchfiles.watch(
                self._root,
                stop_event=self._stop,
                watch_filter=None,
                debounce=_DEBOUNCE_MS,
                step=_STEP_MS,
                rust_timeout=int(poll_s * 1000),
                yield_on_timeout=True,
                raise_interrupt=False,
            ):
                return
        except (OSError, RuntimeError) as error:  # out of watches: then only the time counts
            log.debug("no_watch", why=str(error))
            self._stop.wait(max(0.0, poll_s - (time.monotonic() - began)))
