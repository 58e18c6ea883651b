"""The bridge's loop from files to mailboxes: it appends the file queue's messages and polls to the log.

**Delivers** each line at least once to each recipient's mailbox, under the message's own id, so that it counts
once. **Acknowledges** (moves its cursor) when Kafka has the records.
**Loses when** a line is expired and removed before the bridge has read it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from connectors.doors.file_bridge.held_lines import CONSUMER, HeldKey, HeldRetries, PutOff
from connectors.doors.file_bridge.held_lines import PREFIX as HELD_PREFIX
from connectors.doors.file_bridge.posting_rules import BridgeRules, GatewayBlobs
from connectors.doors.file_bridge.queue_folder import FolderWatch, queue_root, wait_free
from connectors.doors.file_bridge.records import (
    PollsRead,
    Progress,
    ViewUnreadable,
    claims_of,
    claims_of_ids,
    known_messages,
    progress_file,
    read_polls,
)
from connectors.doors.file_bridge.session_carrier import SessionCarrier
from connectors.log.kafka_topic import RenewingPublisher
from connectors.log.publisher import RecordRefused
from connectors.plumbing.network.rates import Backoff
from schemas.keys.record_macs import FILE_BRIDGE
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.wire.record import OutgoingRecord, Position
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.queue import Queue, QueueError
from trunkline_agent.queue.delayed_messages import delayed_names
from trunkline_agent.queue.message_record import is_name
from trunkline_agent.queue.session_files import SessionFolder

log = structlog.stdlib.get_logger(__name__)

_BACKOFF_MOST_S: Final = 2.0
_ACK_GRACE_S: Final = 5.0
# Polls that wait for their session, and claims that are appended at once.
_HELD: Final = 1000
_CLAIMS: Final = 1000
# Messages that are remembered for each held agent.
_TAKEN: Final = 200_000
_POSTED_LATER: Final = "posted later"
# How long the bridge waits for the limits and the verdicts of the gateway when it starts.
_RULES_S: Final = 5.0
_RULES_TICK_S: Final = 0.05
_LOCK_S: Final = 0.25
# A look ends after this time even if there is more, so that new sessions and polls get their turn.
_LOOK_S: Final = 1.0


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
        rules: The limits of mailboxes and senders.
        blobs: Stores bodies that are too long for a record.
        agents: Returns the names of the agents with a definition, None while they are not known, such as
            `MailboxFollower.agents`. These agents get the broadcasts of the session `default`, too.
        ready: Called whenever all messages and polls in the files have been appended.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        consumers: Consumers,
        rules: BridgeRules,
        blobs: GatewayBlobs,
        agents: Callable[[], frozenset[str] | None] = frozenset,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._root = str(queue_root(settings))
        self._stop = stop
        self._consumers = consumers
        self._rules = rules
        self._blobs = blobs
        self._queue = Queue(self._root)
        self._retries = HeldRetries()
        # Messages that held agents have taken from the files. Some may be posted later, and are claimed then.
        self._taken: dict[HeldKey, set[str]] = {}
        self._agents = agents
        self._ready = ready
        self._progress_file = progress_file(settings)
        self._progress = Progress.load(self._progress_file)
        rules.own_before = self._progress.own_mailboxes
        self._publisher = RenewingPublisher(settings, signer=FILE_BRIDGE, close_s=_ACK_GRACE_S)
        self._audit = self._progress.audit
        self._held: list[Mapping[str, Any]] = []
        self._found: dict[str, frozenset[str]] = {}
        self._links: set[str] = set()
        self._waiting = PutOff(_report)
        self._watch = FolderWatch(self._root, stop, settings.files.poll_s, _is_own_file)

    def run(self) -> None:
        """Call `look` when a file of the queue changes, and at regular times, until `stop` is set.

        First it waits at most 5 s for the limits. At its end the bridge is closed, and cannot run again.

        While Kafka or a file is unavailable, it logs that and tries again. Raises TrunklineError when the topic
        does not match the settings.
        """
        backoff = Backoff(most_s=_BACKOFF_MOST_S)
        # Without limits and verdicts the bridge would post more than a mailbox may have.
        until = time.monotonic() + _RULES_S
        while not self._rules.is_complete and time.monotonic() < until and not self._stop.wait(_RULES_TICK_S):
            pass
        try:
            while not self._stop.is_set():
                try:
                    is_all = self.look()
                    backoff.reset()
                    if is_all:
                        self._ready()
                        self._watch.wait()
                except (BackboneUnreachable, OSError) as error:
                    log.warning("waits", why=str(error))
                    self._stop.wait(backoff.next_s())
        finally:
            self._watch.close()
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
        self._rules.begin()
        has_room = len(self._held) <= _HELD
        polls = read_polls(self._root, self._audit) if has_room else PollsRead([], self._audit)
        names = self._sessions()
        self._waiting.keep(names)
        left = {name: self._carrier(name) for name in names if not self._waiting.waits(name)}
        behind = set(names) - left.keys()
        behind |= self._each(left, self._release)
        behind |= self._each(left, self._find_consumers)
        self._note_taken(polls.polls)
        self._forget_gone(names)
        self._consumers.by_session = dict(self._found)
        behind |= self._each(left, self._carry_late)
        behind |= self._each(left, self._carry_held)
        until = time.monotonic() + _LOOK_S
        while left and not self._stop.is_set() and time.monotonic() < until:
            # In turns, so that a session with many lines does not delay the others.
            behind |= self._each(left, self._carry_some)
        if self._stop.is_set():
            return False
        self._claim(polls, behind | left.keys())
        self._note_held()
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

    def _release(self, session: str, _: SessionCarrier) -> bool:
        """Append the session's delayed messages whose time has come, also if nobody polls it."""
        with SessionFolder(self._root, session, create=False) as folder:
            if not delayed_names(folder, time.time()):
                return True
            wait_free(folder, _LOCK_S)
        self._queue.release(session)
        return True

    def _find_consumers(self, session: str, carrier: SessionCarrier) -> bool:
        found = carrier.consumers()
        self._found[session] = frozenset(found.agents)
        self._retries.keep(session, found.held)
        return True

    def _carry_held(self, session: str, carrier: SessionCarrier) -> bool:
        """Try the held recipients whose pause is over."""
        consumers = sorted(self._progress.served.get(session, ()))
        until, is_more = time.monotonic() + _LOOK_S, True
        while is_more and time.monotonic() < until:
            is_more = False
            for recipient, lines in self._retries.due(session):
                if self._stop.is_set():
                    return True
                carried = carrier.carry_held(recipient, consumers, lines)
                self._retries.tried(session, recipient, carried)
                # Else a mailbox would stay full of messages that its reader has.
                taken = self._taken.get(HeldKey(session, recipient), set())
                ids = [one for one in carried.ids if one in taken]
                self._append(list(claims_of_ids(session, recipient, ids, _POSTED_LATER)))
                is_more |= carried.more
        return True

    def _note_held(self) -> None:
        """Save what waits, for `trunkline doctor`, and which mailboxes have own limits."""
        now = self._waiting.stuck(), self._retries.reasons(), set(self._rules.own_mailboxes)
        progress = self._progress
        if now != (progress.stuck, progress.held, progress.own_mailboxes):
            progress.stuck, progress.held, progress.own_mailboxes = now
            self._save()

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
        self._retries.begin(session, carried.held)
        return carried.more

    def _claim(self, polls: PollsRead, behind: set[str]) -> None:
        """Append claims for the messages that polls have taken.

        Polls of a session with lines that are not carried yet wait for these. The place in the audit is saved
        only after that.
        """
        found = [*self._held, *polls.polls]
        now = [poll for poll in found if poll["session"] not in behind]
        claims = [claim for poll in now for claim in claims_of(poll)]
        self._note_taken(now)
        for first in range(0, max(1, len(claims)), _CLAIMS):
            self._append(claims[first : first + _CLAIMS])
        self._held, self._audit = [poll for poll in found if poll["session"] in behind], polls.place
        if not (self._held or self._taken) and self._audit != self._progress.audit:
            self._progress.audit = self._audit
            self._save()

    def _note_taken(self, polls: Sequence[Mapping[str, Any]]) -> None:
        """Remember which messages held agents have taken, and forget those of agents that are not held."""
        self._taken = {key: ids for key, ids in self._taken.items() if self._retries.has(*key)}
        for poll in polls:
            key = HeldKey(poll["session"], poll["agent_id"])
            if not self._retries.has(*key):
                continue
            taken = self._taken.setdefault(key, set())
            if len(taken) < _TAKEN:
                taken.update(poll["msg_ids"])
            else:
                log.warning("polls_dropped", polls=1)

    def _save(self) -> None:
        self._progress.save(self._progress_file)

    def _forget_gone(self, sessions: Sequence[str]) -> None:
        """Forget deleted sessions, so that a new one of the same name begins anew."""
        for name in self._found.keys() - set(sessions):
            del self._found[name]
            self._retries.forget(name)
        gone = self._progress.served.keys() - set(sessions)
        for name in gone:
            del self._progress.served[name]
        if gone:
            self._save()

    def _carrier(self, session: str) -> SessionCarrier:
        known = partial(known_messages, self._settings)
        return SessionCarrier(self._root, session, self._post, known, self._stop, self._rules, self._blobs)

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

    def _post(self, records: Sequence[OutgoingRecord]) -> list[str | None]:
        """Append records, and return for each why its line must be carried again; None: it need not."""
        return self._rules.reasons(self._append(records))

    def _append(self, records: Sequence[OutgoingRecord]) -> list[Position]:
        """Append and wait for Kafka. Raises BackboneUnreachable."""
        publisher = self._publisher.live()
        waiting = [(record, publisher.append(record)) for record in records]
        timeout_s = self._settings.kafka.delivery_timeout_s + _ACK_GRACE_S
        positions = []
        for record, append in waiting:
            try:
                positions.append(append.result(timeout_s))
            except RecordRefused as error:
                log.warning("record_refused", stream=record.stream, ce_id=record.ce_id, why=str(error))
                positions.append(self._publisher.live().append_cut(record).result(timeout_s))
        return positions


def _is_own_file(name: str) -> bool:
    """Return whether only the bridge writes the file of this name, or of its draft: a cursor of its own."""
    return name.removeprefix(".").startswith((f"{CONSUMER}.", HELD_PREFIX))


def _report(session: str, why: str) -> None:
    log.warning("session_waits", session=session, why=why)
