"""The messages that were published on inboxes, and that their agents have not confirmed yet (DL-30).

They are pending in the log, so this knowledge may be lost: another bridge publishes them again, under the same
ids. A few messages of each agent are under way at once, which bounds what a broker has of them.

A queue of agents decides whose inbox is served next. One thread at a time serves an agent. An agent that could
not be served, for example because its inbox has no subscriber, is tried again after a growing pause.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# The messages of one agent that may be under way, and their bytes. A longer message is under way alone.
MESSAGES_MOST: Final = 64
BYTES_MOST: Final = 1024 * 1024
# The longest pause before messages without a confirmation are published again.
LONGEST_S: Final = 900.0
# From so many repetitions on, an agent is reported as one that does not confirm.
REPEATS_LEAST: Final = 3
# An agent that connects again and again causes at most one repetition in this time.
_HELLO_S: Final = 1.0


class Begun(NamedTuple):
    """The state of a window before messages are published.

    `published` has the ids of those that need not be published now. `repeats` is how often messages were
    published again since the agent's last confirmation, if that happens now because of the time, else 0.
    """

    published: frozenset[str]
    repeats: int = 0


@dataclass
class _Window:
    """The published messages of one agent: their sizes in bytes by id, and when they are published again.

    `confirming` are those whose confirmation is on its way to the log, with the time until which that counts.
    """

    pause_s: float
    sizes: dict[str, int] = field(default_factory=dict)
    confirming: dict[str, float] = field(default_factory=dict)
    total: int = 0
    again_at: float = math.inf
    repeated_at: float = -math.inf
    repeats: int = 0
    is_asked: bool = False

    def remove(self, message_id: str) -> bool:
        size = self.sizes.pop(message_id, None)
        self.confirming.pop(message_id, None)
        self.total -= size or 0
        if not self.sizes:
            self.again_at = math.inf
        return size is not None

    def empty(self, now: float) -> None:
        """Forget the messages, but not those whose confirmation is on its way."""
        self.confirming = {one: until for one, until in self.confirming.items() if until > now}
        self.sizes = {one: size for one, size in self.sizes.items() if one in self.confirming}
        self.total = sum(self.sizes.values())
        self.again_at = min(self.confirming.values(), default=math.inf)
        self.repeated_at = now

    def ask(self, at: float, first_s: float) -> None:
        """Let the messages be published again at this time, and begin with short pauses."""
        if self.sizes:
            self.again_at, self.pause_s, self.is_asked = min(self.again_at, at), first_s, True


class InboxWindows:
    """The windows of all agents. Thread-safe. One thread at a time publishes for an agent.

    Args:
        first_s: The pause before messages without a confirmation are published again. It doubles each time, up
            to 15 minutes, and is short again after a confirmation.
        clock: Returns seconds and never goes back.
    """

    def __init__(self, first_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}

    def keep(self, agents: Collection[str]) -> None:
        """Forget the windows of all other agents."""
        with self._lock:
            for agent in self._windows.keys() - set(agents):
                del self._windows[agent]

    def _of(self, agent: str) -> _Window:
        """Return the window of an agent. Without one, it is an empty window that is not kept."""
        return self._windows.get(agent) or _Window(self._first_s)

    def is_open(self, agent: str) -> bool:
        """Return whether to look for messages: at most half of the room is used, or a repetition is due."""
        with self._lock:
            window = self._of(agent)
            if self._clock() >= window.again_at:
                return True
            return 2 * len(window.sizes) <= MESSAGES_MOST and 2 * window.total <= BYTES_MOST

    def begin(self, agent: str, pending: Sequence[str]) -> Begun:
        """Forget the messages that have ended, and all messages if it is time to publish them again.

        `pending` are the ids of the messages that are the next ones of the mailbox, in its order.
        """
        with self._lock:
            window = self._windows.setdefault(agent, _Window(self._first_s))
            for message_id in window.sizes.keys() - set(pending):
                window.remove(message_id)
            now, repeats = self._clock(), 0
            if now >= window.again_at:
                if not window.is_asked:
                    window.pause_s = min(2 * window.pause_s, LONGEST_S)
                    window.repeats = repeats = window.repeats + 1
                window.empty(now)
            window.is_asked = False
            return Begun(frozenset(window.sizes), repeats)

    def add(self, agent: str, message_id: str, size: int) -> int | None:
        """Add a message that is about to be published. Return None if the window has no room for it.

        Otherwise return for how many seconds this copy counts: then the next copy is published. Call it after
        `begin`, from the same thread.
        """
        with self._lock:
            window = self._windows.setdefault(agent, _Window(self._first_s))
            if window.sizes and (len(window.sizes) >= MESSAGES_MOST or window.total + size > BYTES_MOST):
                return None
            window.again_at = min(window.again_at, self._clock() + window.pause_s)
            window.sizes[message_id] = size
            window.total += size
            return math.ceil(window.pause_s)

    def drop(self, agent: str, message_ids: Sequence[str]) -> None:
        """Forget messages that the broker did not take."""
        with self._lock:
            window = self._of(agent)
            for message_id in message_ids:
                window.remove(message_id)

    def confirm(self, agent: str, message_ids: Sequence[str]) -> None:
        """Forget messages that the agent has confirmed."""
        with self._lock:
            window = self._of(agent)
            before = list(window.sizes)
            count = sum([window.remove(message_id) for message_id in message_ids])
            if not count:
                return
            window.pause_s, window.repeats = self._first_s, 0
            # The agent may be slow. But if it has confirmed later messages, the earlier ones were lost.
            if window.sizes and next(iter(window.sizes)) == before[count]:
                window.again_at = self._clock() + window.pause_s

    def begin_confirmation(self, agent: str, message_ids: Sequence[str]) -> bool:
        """Note that a confirmation has come. Return whether one of these messages waits for it.

        Until the confirmation is in the log, the messages are not published again, but at most for one pause.
        """
        with self._lock:
            window = self._of(agent)
            found = [message_id for message_id in message_ids if message_id in window.sizes]
            window.confirming.update(dict.fromkeys(found, self._clock() + self._first_s))
            return bool(found)

    def refuse_confirmation(self, agent: str, message_ids: Sequence[str]) -> None:
        """Note that a confirmation was rejected, so that the messages go on waiting for another one."""
        with self._lock:
            window = self._of(agent)
            for message_id in message_ids:
                window.confirming.pop(message_id, None)

    def again(self, agent: str) -> None:
        """Let an agent's messages be published again at once, but at most once in a second."""
        with self._lock:
            window = self._of(agent)
            window.ask(max(self._clock(), window.repeated_at + _HELLO_S), self._first_s)

    def all_again(self) -> None:
        """Let the messages of all agents be published again at once, because the broker may have lost them."""
        with self._lock:
            for window in self._windows.values():
                window.ask(self._clock(), self._first_s)

    def unconfirmed(self) -> dict[str, int]:
        """Return how often messages were published again since the last confirmation, of agents with many."""
        with self._lock:
            return {
                agent: window.repeats
                for agent, window in self._windows.items()
                if window.repeats >= REPEATS_LEAST and window.sizes
            }

    def due_in_s(self, agent: str) -> float | None:
        """Return in how many seconds an agent's messages are published again; None while it has none."""
        with self._lock:
            window = self._of(agent)
            return max(0.0, window.again_at - self._clock()) if window.sizes else None


_FIRST_S: Final = 0.1


@dataclass
class _Agent:
    """The state of one agent. `due_at` is the time of its next turn, None when it has no message."""

    due_at: float | None
    failures: int = 0
    is_busy: bool = False
    is_served: bool = True

    @property
    def is_paused(self) -> bool:
        """True if the agent's next turn waits for the end of a pause after failures."""
        return self.failures > 0 and self.due_at is not None and self.due_at > time.monotonic()

    def be_due(self) -> None:
        """Make the agent due now, and end its pause after failures, if there is one."""
        self.failures, self.due_at = 0, time.monotonic()


class InboxTurns:
    """A queue of agents whose messages are to be delivered. Thread-safe.

    Worker threads call `take`, deliver, and call `give_back`. Only the agents named in the last call of `serve`
    are in the queue. After a failed delivery an agent pauses: 0.2 s first, doubling up to `longest_s`.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._changed = threading.Condition()
        self._agents: dict[str, _Agent] = {}
        self._closed = False

    def serve(self, names: set[str]) -> None:
        """Set the agents of the queue to `names`. New agents are due at once. All other agents leave the queue.

        An agent that a thread is serving leaves after its turn.
        """
        with self._changed:
            for name in sorted(names):
                agent = self._agents.setdefault(name, _Agent(None, is_served=False))
                if not agent.is_served:
                    agent.be_due()
            for name, agent in list(self._agents.items()):
                agent.is_served = name in names
                if not agent.is_served and not agent.is_busy:
                    del self._agents[name]
            self._changed.notify_all()

    def due(self, name: str) -> None:
        """Note that an agent has a new message, so that its turn comes.

        An agent that pauses after a failed delivery has its turn when the pause ends. An agent that is not in
        the queue is ignored.
        """
        with self._changed:
            agent = self._agents.get(name)
            if agent is not None and (agent.due_at is None or not agent.failures):
                now = time.monotonic()
                agent.due_at = now if agent.due_at is None else min(agent.due_at, now)
                self._changed.notify()

    def wake(self, name: str) -> None:
        """Make a pausing agent due at once, because it is connected now.

        Its count of failures starts again at 0. Does nothing for an agent that does not pause after a failed
        delivery, or that is not in the queue.
        """
        with self._changed:
            agent = self._agents.get(name)
            if agent is not None and agent.is_paused:
                agent.be_due()
                self._changed.notify()

    def all_are_due(self) -> None:
        """Make all agents due at once, also those that pause. Call it when messages may have been missed."""
        with self._changed:
            for agent in self._agents.values():
                agent.be_due()
            self._changed.notify_all()

    def take(self, timeout_s: float) -> str | None:
        """Wait at most `timeout_s` seconds for an agent that is due, and return its name.

        No other thread gets this agent before it is passed to `give_back`. Returns None after the timeout, or
        at once when the queue is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                waiting = [
                    (agent.due_at, name)
                    for name, agent in self._agents.items()
                    if agent.due_at is not None and agent.is_served and not agent.is_busy
                ]
                now = time.monotonic()
                due_at, name = min(waiting, default=(deadline, ""))
                if name and due_at <= now:
                    self._agents[name].is_busy, self._agents[name].due_at = True, None
                    return name
                if now >= deadline:
                    return None
                self._changed.wait(min(due_at, deadline) - now)
            return None

    def give_back(self, name: str, *, is_done: bool, again_s: float | None = None) -> None:
        """End the turn of the agent `name`, which `take` returned.

        `is_done` is whether all was published that could be. If not, the agent is due again after a pause. If
        so, it is due again in `again_s` seconds at the latest, or with its next message for None.
        """
        with self._changed:
            agent = self._agents[name]
            agent.is_busy = False
            if is_done:
                agent.failures = 0
                if again_s is not None:
                    next_at = time.monotonic() + again_s
                    agent.due_at = next_at if agent.due_at is None else min(agent.due_at, next_at)
            else:
                agent.failures += 1
                pause_s = min(_FIRST_S * 2 ** min(agent.failures, 20), self._longest_s)
                agent.due_at = time.monotonic() + pause_s
            self._changed.notify()

    def close(self) -> None:
        """Close the queue: a waiting call of `take` returns None at once, and so does each later one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
