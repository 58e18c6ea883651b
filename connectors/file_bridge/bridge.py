"""The bridge's loop from files to mailboxes: it appends the file queue's messages and polls to the log.

**Delivers** each line at least once to each recipient's mailbox, under the message's own id, so that it counts
once. **Acknowledges** (moves its cursor) when Kafka has the records.
**Loses when** a line is expired and removed before the bridge has read it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog
import watchfiles

from connectors.file_bridge.mailbox_reader import ViewUnreadable, known_messages
from connectors.file_bridge.progress import PollsRead, Progress, read_polls
from connectors.file_bridge.queue_root import queue_root
from connectors.file_bridge.records import claims_of
from connectors.file_bridge.session_carrier import SessionCarrier
from connectors.file_queue import QueueError
from connectors.file_queue.message_record import is_name
from connectors.log.publisher import RecordRefused
from connectors.log.renewing_publisher import RenewingPublisher
from schemas.errors import BackboneUnreachable
from schemas.keys.record_macs import FILE_BRIDGE
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.wire.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

_BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_ACK_GRACE_S: Final = 5.0
# Polls that wait for their session, and claims that are appended at once.
_HELD: Final = 1000
_CLAIMS: Final = 1000
# A look ends after this time even if there is more, so that new sessions and polls get their turn.
_LOOK_S: Final = 1.0
# Changes within this time count as one. They only trigger a look, which reads the files.
_DEBOUNCE_MS: Final = 20
_STEP_MS: Final = 10
# The pauses before a session or a reader that failed is tried again.
_PUT_OFF_S: Final = (0.5, 1.0, 2.0, 5.0)

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Failing:
    until: float = -math.inf
    failures: int = 0
    why: str | None = None


class PutOff(Generic[Key]):
    """A registry of pauses after failures, one for each key, so that one failing key does not delay the others.

    A key names the thing that failed, such as a session. `report` is called with the key and the error's text
    after a failure, but not again while the text stays the same. Nothing here blocks: the caller asks `waits`.
    """

    def __init__(self, report: Callable[[Key, str], object]) -> None:
        self._report = report
        self._failing: dict[Key, _Failing] = {}

    def waits(self, key: Key) -> bool:
        """Return whether the pause of `key` after its last failure is not over yet."""
        return key in self._failing and time.monotonic() < self._failing[key].until

    def failed(self, key: Key, error: Exception) -> None:
        """Begin a pause for `key` after a failure, and report the error if its text is new for this key.

        Failures in a row make the pause longer, up to five seconds.
        """
        found = self._failing.setdefault(key, _Failing())
        found.until = time.monotonic() + _PUT_OFF_S[min(found.failures, len(_PUT_OFF_S) - 1)]
        found.failures += 1
        why = str(error)
        if found.why != why:
            found.why = why
            self._report(key, why)

    def went_well(self, key: Key) -> None:
        """End the pause of `key` after a success. Its next failure is reported again."""
        self._failing.pop(key, None)

    def keep(self, keys: Collection[Key]) -> None:
        """Remove the pauses of all keys that are not in `keys`, the keys of all things that still exist."""
        for key in self._failing.keys() - set(keys):
            del self._failing[key]


class Consumers:
    """The names of the agents that poll the file queue (consumers), by session.

    One thread replaces `by_session` as a whole. Any thread may read it.
    """

    def __init__(self) -> None:
        self.by_session: dict[str, frozenset[str]] = {}

    def all(self) -> list[tuple[str, str]]:
        """Return a pair of session and agent name for each agent that polls the file queue."""
        return [(session, name) for session, names in self.by_session.items() for name in names]

    def has(self, session: str, name: str) -> bool:
        """Return whether the agent `name` polls this session."""
        return name in self.by_session.get(session, ())


class FileBridge:
    """The direction from the file queue to the log: it appends messages to mailboxes, and claims for polls.

    Args:
        settings: The settings of the queue and the log.
        stop: Ends `run` when it is set.
        consumers: The object into which each `look` writes the agents that poll the queue.
        agents: Returns the names of the agents with a definition, None while they are not known, such as
            `MailboxFollower.agents`. These agents get the broadcasts of the session `default`, too.
        ready: Called whenever all messages and polls in the files have been appended.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        consumers: Consumers,
        agents: Callable[[], frozenset[str] | None] = frozenset,
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
        self._publisher = RenewingPublisher(settings, signer=FILE_BRIDGE, close_s=_ACK_GRACE_S)
        self._audit = self._progress.audit
        self._held: list[Mapping[str, Any]] = []
        self._found: dict[str, frozenset[str]] = {}
        self._links: set[str] = set()
        self._waiting = PutOff(_report)

    def run(self) -> None:
        """Call `look` when a file of the queue changes, and at regular times, until `stop` is set.

        While Kafka or a file is unavailable, it logs that and tries again. Raises TrunklineError when the topic
        does not match the settings.
        """
        failures = 0
        try:
            while not self._stop.is_set():
                try:
                    is_all = self.look()
                    failures = 0
                    if is_all:
                        self._ready()
                        self._wait()
                except (BackboneUnreachable, OSError) as error:
                    log.warning("waits", why=str(error))
                    self._stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                    failures += 1
        finally:
            self._publisher.close()

    def look(self) -> bool:
        """Append new messages and polls of all sessions to the log for about a second at most.

        A session that cannot be read is tried again at a later look and does not delay the others.

        Returns:
            Whether nothing is left to append. False also when `stop` was set meanwhile.

        Raises:
            BackboneUnreachable: Kafka did not acknowledge the records.
            OSError: The queue's folder or the progress file cannot be used.
        """
        # Read the polls first: the lines that they took are in the files then, and are carried before the
        # claims.
        has_room = len(self._held) <= _HELD
        polls = read_polls(self._root, self._audit) if has_room else PollsRead([], self._audit)
        names = self._sessions()
        self._waiting.keep(names)
        left = {name: self._carrier(name) for name in names if not self._waiting.waits(name)}
        behind = set(names) - left.keys()
        behind |= self._each(left, self._find_consumers)
        self._forget_gone(names)
        self._consumers.by_session = dict(self._found)
        behind |= self._each(left, self._carry_late)
        until = time.monotonic() + _LOOK_S
        while left and not self._stop.is_set() and time.monotonic() < until:
            # In turns, so that a session with many lines does not delay the others.
            behind |= self._each(left, self._carry_some)
        if self._stop.is_set():
            return False
        self._claim(polls, behind | left.keys())
        if not left and len(self._held) > _HELD:
            log.warning("polls_dropped", polls=len(self._held) - _HELD)
            self._held = self._held[-_HELD:]
        return not left

    def _each(self, left: dict[str, SessionCarrier], step: Callable[[str, SessionCarrier], bool]) -> set[str]:
        """Take a step with each session, and return those that failed.

        A session that is done or has failed is removed from `left`.
        """
        failed = set()
        for name, carrier in list(left.items()):
            if self._stop.is_set():
                break
            try:
                if step(name, carrier):
                    continue
                self._waiting.went_well(name)
            except (ViewUnreadable, QueueError, OSError) as error:
                if (Path(self._root) / "sessions" / name).is_dir():  # else it was removed meanwhile
                    self._waiting.failed(name, error)
                    failed.add(name)
            del left[name]
        return failed

    def _find_consumers(self, session: str, carrier: SessionCarrier) -> bool:
        self._found[session] = frozenset(carrier.consumers())
        return True

    def _carry_late(self, session: str, carrier: SessionCarrier) -> bool:
        """Carry earlier broadcasts for consumers that have not got them."""
        agents = self._agents() if session == DEFAULT_REALM else frozenset()
        now = self._found[session] | (agents or frozenset())
        before = self._progress.served.get(session, set())
        # Consumers that are gone are forgotten, but not while the registered agents are unknown.
        kept = before if agents is None else before & now
        late = sorted(now - kept)
        if late and not carrier.carry_broadcasts(late):
            return True
        if kept | now != before:
            self._progress.served[session] = kept | now
            self._save()
        return True

    def _carry_some(self, session: str, carrier: SessionCarrier) -> bool:
        carried = carrier.carry_some(sorted(self._progress.served.get(session, ())))
        if carried.lines:
            log.info("carried", session=session, lines=carried.lines)
        return carried.more

    def _claim(self, polls: PollsRead, behind: set[str]) -> None:
        """Append claims for the messages that polls have taken.

        Polls of a session with lines that are not carried yet wait for these. The place in the audit is saved
        only after that.
        """
        found = [*self._held, *polls.polls]
        claims = [claim for poll in found if poll["session"] not in behind for claim in claims_of(poll)]
        for first in range(0, max(1, len(claims)), _CLAIMS):
            self._append(claims[first : first + _CLAIMS])
        self._held, self._audit = [poll for poll in found if poll["session"] in behind], polls.place
        if not self._held and self._audit != self._progress.audit:
            self._progress.audit = self._audit
            self._save()

    def _save(self) -> None:
        self._progress.save(self._progress_file)

    def _forget_gone(self, sessions: Sequence[str]) -> None:
        """Forget deleted sessions, so that a new one of the same name begins anew."""
        for name in self._found.keys() - set(sessions):
            del self._found[name]
        gone = self._progress.served.keys() - set(sessions)
        for name in gone:
            del self._progress.served[name]
        if gone:
            self._save()

    def _carrier(self, session: str) -> SessionCarrier:
        known = partial(known_messages, self._settings)
        return SessionCarrier(self._root, session, self._append, known, self._stop)

    def _sessions(self) -> list[str]:
        found = []
        try:
            with os.scandir(f"{self._root}/sessions") as entries:
                for entry in entries:
                    if is_name(entry.name) and entry.is_dir(follow_symlinks=False):
                        found.append(entry.name)
                    elif entry.is_symlink() and entry.name not in self._links:
                        # The cursor would be that of another folder.
                        self._links.add(entry.name)
                        _report(entry.name, "a link is not followed")
        except FileNotFoundError:
            return []
        return sorted(found)

    def _append(self, records: Sequence[OutgoingRecord]) -> None:
        """Append and wait for Kafka. Raises BackboneUnreachable."""
        publisher = self._publisher.live()
        waiting = [(record, publisher.append(record)) for record in records]
        timeout_s = self._settings.kafka.delivery_timeout_s + _ACK_GRACE_S
        for record, append in waiting:
            try:
                append.result(timeout_s)
            except RecordRefused as error:
                log.warning("record_refused", stream=record.stream, ce_id=record.ce_id, why=str(error))
                self._publisher.live().append_cut(record).result(timeout_s)

    def _wait(self) -> None:
        """Wait until something may have changed, at most `files.poll_s`."""
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
        except (OSError, RuntimeError) as error:  # no watches left: look after the time alone
            log.debug("no_watch", why=str(error))
            self._stop.wait(max(0.0, poll_s - (time.monotonic() - began)))


def _report(session: str, why: str) -> None:
    log.warning("session_waits", session=session, why=why)
