"""The connections of a gateway's listeners: how many there may be, how long each may take, which one gives way.

Connections that have not authenticated share one budget. Beyond it the oldest that is not being answered is
closed, so that a newcomer, which sends its request at once, gets through. A connection on which a request came
with a valid credential moves to the authenticated budget, where a principal has at most half of the places.
Beyond its share it loses connections of its own; beyond the budget, the principal with the most does.

This module keeps the books and knows no sockets. All of it belongs to one event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

# How often `sweep` is to be called: a time-out is noticed so much later at most.
SWEEP_S: Final = 1.0
# A client that takes nothing of an answer for so long is cut off. Streams have shorter bounds of their own.
_UNREAD_S: Final = 70.0
# The rest of an answer, and TLS' good-bye, before a closed connection is cut.
_CLOSING_S: Final = 10.0
# A handler answers 408 in time; only what reads no body is cut off this much later.
_BODY_GRACE_S: Final = 2.0

_UNKNOWN: Final = ""


class Phase(Enum):
    """The step that a connection is at. The value is the reason for closing it when it takes too long."""

    HEAD = "head_timeout"
    BODY = "body_timeout"
    IDLE = "idle_timeout"
    ANSWERING = "answering"
    UNREAD = "answer_not_read"
    CLOSING = "not_closed"


class Connection(Protocol):
    """A connection as the budget sees it."""

    def phase(self) -> tuple[Phase, Any]:
        """Return the step that it is at, and a token that differs after each request."""

    def cut(self) -> None:
        """End it at once, whatever is still to be sent."""


@dataclass(frozen=True)
class BudgetLimits:
    """`anonymous` and `authenticated` are numbers of connections, the others seconds."""

    anonymous: int
    authenticated: int
    head_s: float
    body_s: float

    @property
    def share(self) -> int:
        """How many authenticated connections one principal may have."""
        return max(1, self.authenticated // 2)


class Place:
    """One connection's place in the budget."""

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
    """All connections of some listeners. `clock` returns seconds and never goes back. `on_cut` receives the
    listener and the reason of each connection that is ended here.
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
        # By principal, in the order in which they came; strangers have the empty name. A dict keeps order.
        self._places: dict[str, dict[Place, None]] = {_UNKNOWN: {}}
        self._authenticated = 0
        self.open: Counter[tuple[str, bool]] = Counter()
        self.cut: Counter[tuple[str, str]] = Counter()

    def take(self, connection: Connection, listener: str) -> Place | None:
        """Give a new connection its place. Returns None when each other one is being answered."""
        anonymous = self._places[_UNKNOWN]
        if len(anonymous) >= self.limits.anonymous and not self._cut_one(anonymous, "anonymous_budget"):
            self.count_cut(listener, "refused")
            return None
        place = Place(connection, listener, self._clock())
        anonymous[place] = None
        self.open[listener, False] += 1
        return place

    def authenticate(self, place: Place, principal: str) -> bool:
        """Note whose connection it is. Returns False when this principal may have no more."""
        if place.principal == principal or not place.is_open:
            return True
        own = self._places.get(principal, {})
        if len(own) >= self.limits.share:
            if not self._cut_one(own, "principal_share"):
                return False
        elif self._authenticated >= self.limits.authenticated and not place.principal:
            greatest = max((name for name in self._places if name), key=lambda name: len(self._places[name]))
            if not self._cut_one(self._places[greatest], "authenticated_budget"):
                return False
        self._remove(place)
        place.principal = principal
        self._places.setdefault(principal, {})[place] = None
        self._authenticated += 1
        self.open[place.listener, True] += 1
        return True

    def give_back(self, place: Place) -> None:
        """Free a place, once or more often."""
        if place.is_open:
            place.is_open = False
            self._remove(place)

    def sweep(self) -> None:
        """Cut all connections that have taken too long for what they are at."""
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
        return float("inf")  # an answer takes its time, and uvicorn's own timer ends what is idle

    def _cut_one(self, places: Iterable[Place], reason: str) -> bool:
        """Cut the oldest that is not being answered, and return whether there was one.

        Of a principal's connections, one with an unfinished request goes before one between two requests.
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
        """Count a connection that was ended or refused."""
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
