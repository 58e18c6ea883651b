"""The budget of connections: their number, their time limits, and which one is closed for a new one.

Connections that have not authenticated share one budget. When it is full, the oldest one that is not being
answered is closed, so that a new client, which sends its request at once, gets through. A request with a valid
credential moves its connection to the authenticated budget, where each principal has a share of the places
(`connectors.hub.serving.shares`). A principal beyond its share loses one of its own connections. When the
budget is full, the principal with the most connections loses one.

This module only counts and knows no sockets. All calls must come from one event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from connectors.hub.serving.metrics import counters, gauges
from connectors.hub.serving.shares import may_have_one_more

# The interval of `sweep`, and so the largest delay of a time-out.
SWEEP_S: Final = 1.0
# The time limit of a client that reads nothing of its answer. Streams have shorter limits of their own.
_UNREAD_S: Final = 70.0
# The time for the rest of an answer and the TLS closure.
_CLOSING_S: Final = 10.0
# A handler that reads the body answers 408 in time. Other connections are cut this much later.
_BODY_GRACE_S: Final = 2.0

_UNKNOWN: Final = ""


class Phase(Enum):
    """The phase of an HTTP connection, such as the reading of a request's head.

    The value is the reason for closing the connection when the phase takes too long.
    """

    HEAD = "head_timeout"
    BODY = "body_timeout"
    IDLE = "idle_timeout"
    ANSWERING = "answering"
    UNREAD = "answer_not_read"
    CLOSING = "not_closed"


class Connection(Protocol):
    """A connection that a budget counts and may close, such as BoundedHttp."""

    def phase(self) -> tuple[Phase, Any]:
        """Return the connection's phase, and an object that identifies the present request.

        The budget compares both with those of its last call. While they are equal, the phase's time limit runs.
        """

    def cut(self) -> None:
        """Abort the connection at once, without sending the bytes that are still in memory."""


@dataclass(frozen=True)
class BudgetLimits:
    """The limits of a connection budget: numbers of connections, and time limits in seconds.

    `anonymous` connections have sent no valid credential yet. `head_s` is the time for a request's head,
    `body_s` for its body.
    """

    anonymous: int
    authenticated: int
    head_s: float
    body_s: float


class Place:
    """The place that one connection occupies in a budget, with its principal and phase."""

    __slots__ = ("connection", "is_open", "listener", "principal", "seen", "since")

    def __init__(self, connection: Connection, listener: str, now: float) -> None:
        self.connection = connection
        self.listener = listener
        self.principal = _UNKNOWN
        self.is_open = True
        self.seen: tuple[Phase, Any] = (Phase.HEAD, None)
        self.since = now


def _nothing(listener: str, reason: str) -> None:
    return None


class ConnectionBudget:
    """A counter of the connections of some listening sockets, which closes connections that exceed a limit.

    Not thread-safe. `open` counts the open connections by listening socket and whether they are authenticated.
    `cut` counts the closed and refused ones by listening socket and reason. Both are for the metrics.

    Args:
        limits: The limits of the budget.
        clock: Returns seconds and never goes back.
        on_cut: Called with the name of the listening socket and the reason, for each connection that the budget
            closes or refuses.
    """

    def __init__(
        self,
        limits: BudgetLimits,
        clock: Callable[[], float],
        on_cut: Callable[[str, str], None] = _nothing,
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._on_cut = on_cut
        # By principal, oldest first. Unauthenticated connections have the empty name.
        self._places: dict[str, dict[Place, None]] = {_UNKNOWN: {}}
        self._authenticated = 0
        self.open: Counter[tuple[str, bool]] = Counter()
        self.cut: Counter[tuple[str, str]] = Counter()

    def take(self, connection: Connection, listener: str) -> Place | None:
        """Give a new connection a place among the anonymous connections, and return the place.

        If all places are taken, the oldest anonymous connection that is not being answered is closed. If all
        are being answered, the result is None. The caller must then abort the new connection. `listener` is the
        name of the listening socket.
        """
        anonymous = self._places[_UNKNOWN]
        if len(anonymous) >= self.limits.anonymous and not self._cut_one(anonymous, "anonymous_budget"):
            self.count_cut(listener, "refused")
            return None
        place = Place(connection, listener, self._clock())
        anonymous[place] = None
        self.open[listener, False] += 1
        return place

    def authenticate(self, place: Place, principal: str, *, is_operator: bool = False) -> bool:
        """Move a connection to the places of a principal, after the connection has sent its valid credential.

        If the principal or the budget has no free place, another connection is closed. Returns False if each
        connection that could be closed is being answered. The caller must then refuse the request. Returns True
        otherwise, also if the connection belongs to the principal already or has ended.
        """
        if place.principal == principal or not place.is_open:
            return True
        own = self._places.get(principal, {})
        limit, taken = self.limits.authenticated, self._authenticated - bool(place.principal)
        if not may_have_one_more(limit, taken, len(own), is_operator=is_operator):
            # A principal with few connections is refused only when the others left none: they give one back.
            greatest = max((name for name in self._places if name), key=lambda name: len(self._places[name]))
            is_small = len(own) < len(self._places[greatest]) - 1
            of, reason = (greatest, "authenticated_budget") if is_small else (principal, "principal_share")
            if not self._cut_one(self._places.get(of, {}), reason):
                return False
        self._remove(place)
        place.principal = principal
        self._places.setdefault(principal, {})[place] = None
        self._authenticated += 1
        self.open[place.listener, True] += 1
        return True

    def give_back(self, place: Place) -> None:
        """Free the place of a connection that has ended. Further calls for the same place do nothing."""
        if place.is_open:
            place.is_open = False
            self._remove(place)

    def sweep(self) -> None:
        """Close the connections whose phase, such as the reading of a head, exceeds its time limit.

        Call this method every `SWEEP_S` seconds. The time of a phase starts with the call that first finds the
        connection in this phase.
        """
        now = self._clock()
        for place in [place for places in self._places.values() for place in places]:
            found = place.connection.phase()
            if found != place.seen:
                place.seen, place.since = found, now
            elif now - place.since >= self._limit_s(place):
                self._cut(place, found[0].value)

    def _limit_s(self, place: Place) -> float:
        match place.seen[0]:
            case Phase.HEAD:
                return self.limits.head_s
            case Phase.BODY:
                return self.limits.body_s + _BODY_GRACE_S
            case Phase.UNREAD:
                return _UNREAD_S
            case Phase.CLOSING:
                return _CLOSING_S
        return float("inf")  # an answer has no limit, and uvicorn's own timer ends idle connections

    def _cut_one(self, places: Iterable[Place], reason: str) -> bool:
        """Cut the oldest connection that is not being answered, and return whether there was one.

        A principal loses a connection with an unfinished request before one that is idle.
        """
        idle = None
        for place in places:
            phase = place.connection.phase()[0]
            if phase is Phase.ANSWERING:
                continue
            if phase is not Phase.IDLE or not place.principal:
                self._cut(place, reason)
                return True
            idle = idle or place
        if idle is not None:
            self._cut(idle, reason)
        return idle is not None

    def _cut(self, place: Place, reason: str) -> None:
        self.give_back(place)
        self.count_cut(place.listener, reason)
        place.connection.cut()

    def count_cut(self, listener: str, reason: str) -> None:
        """Count a connection that was closed or refused, and call `on_cut`. The method closes nothing itself.

        `listener` is the name of the listening socket. `reason` is a short code, such as `refused`, for the
        metrics.
        """
        self.cut[listener, reason] += 1
        self._on_cut(listener, reason)

    def _remove(self, place: Place) -> None:
        places = self._places[place.principal]
        del places[place]
        self.open[place.listener, bool(place.principal)] -= 1
        if place.principal:
            self._authenticated -= 1
            if not places:
                del self._places[place.principal]


class ConnectionFigures(Collector):
    """A metrics collector: for each listening socket the open connections, and those that a budget closed."""

    def __init__(self, budgets: Sequence[ConnectionBudget]) -> None:
        self._budgets = budgets

    def collect(self) -> Iterable[Metric]:
        """Yield the counts of open and of closed connections, for all budgets of this process.

        Prometheus calls this method at each scrape, on any thread.
        """
        yield gauges(
            "connections",
            "Open connections, by listener and whether a request on them was admitted.",
            ["listener", "state"],
            (
                ([listener, "authenticated" if is_known else "anonymous"], count)
                for budget in self._budgets
                for (listener, is_known), count in sorted(dict(budget.open).items())
            ),
        )
        yield counters(
            "connections_cut",
            "Connections that the gateway ended or refused, by listener and reason.",
            ["listener", "reason"],
            (sample for budget in self._budgets for sample in sorted(dict(budget.cut).items())),
        )
