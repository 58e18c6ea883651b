"""A queue of agents that decides whose inbox is served next.

One thread at a time serves an agent. An agent that could not be served, for example because its inbox has no
subscriber, is tried again after a growing pause.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

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
