"""Whose inbox is served next: each agent by one thread at a time, and one that nobody reads for, later."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Final

_FIRST_S: Final = 0.1


class InboxTurns:
    """Thread-safe. Only the agents named last by `serve` have turns. `longest_s`: how long at most one waits
    that could not be served.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._changed = threading.Condition()
        self._served: frozenset[str] = frozenset()
        self._due: OrderedDict[str, None] = OrderedDict()
        self._busy: set[str] = set()
        self._failures: dict[str, int] = {}
        self._again_at: dict[str, float] = {}
        self._closed = False

    def serve(self, agents: set[str]) -> None:
        """These are served from now on; who was not before is due."""
        with self._changed:
            new = agents - self._served
            self._served = frozenset(agents)
            for gone in self._failures.keys() - agents:
                self._forget(gone)
            for agent in sorted(new):
                self._due[agent] = None
            self._changed.notify_all()

    def due(self, agent: str) -> None:
        """There is something for this agent; if it could not be served, its time has to come."""
        with self._changed:
            if agent in self._served and agent not in self._again_at:
                self._due[agent] = None
                self._changed.notify()

    def wake(self, agent: str) -> None:
        """The agent is there: if it waits, it is due now."""
        with self._changed:
            if agent in self._again_at:
                self._forget(agent)
                self._due[agent] = None
                self._changed.notify()

    def all_are_due(self) -> None:
        """Something may have been missed: each agent is due, also one that waits."""
        with self._changed:
            for agent in sorted(self._served):
                self._forget(agent)
                self._due[agent] = None
            self._changed.notify_all()

    def take(self, timeout_s: float) -> str | None:
        """The next agent that is due, busy until it is given back; None when there is none in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for agent in [one for one, at in self._again_at.items() if at <= now]:
                    del self._again_at[agent]
                    self._due[agent] = None
                for agent in self._due:
                    if agent not in self._busy:
                        del self._due[agent]
                        if agent not in self._served:
                            break
                        self._busy.add(agent)
                        return agent
                else:
                    if now >= deadline:
                        return None
                    self._changed.wait(min([deadline - now, *(at - now for at in self._again_at.values())]))
            return None

    def give_back(self, agent: str, *, is_done: bool) -> None:
        """The agent was served, or has to be tried again."""
        with self._changed:
            self._busy.discard(agent)
            if is_done:
                self._forget(agent)
            else:
                failures = self._failures[agent] = self._failures.get(agent, 0) + 1
                wait_s = min(_FIRST_S * 2 ** min(failures, 20), self._longest_s)
                self._due.pop(agent, None)
                self._again_at[agent] = time.monotonic() + wait_s
            self._changed.notify()

    def close(self) -> None:
        """Nobody has a turn any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _forget(self, agent: str) -> None:
        self._failures.pop(agent, None)
        self._again_at.pop(agent, None)
