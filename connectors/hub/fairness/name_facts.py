"""Facts that each message asks of a name, such as its limits, kept until a row changes that they depend on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from schemas.effects.following import GetRow
from schemas.fold.settled import AppliedChange
from schemas.streams.agents.agent_registry import AgentRow
from schemas.streams.agents.mqtt_agents import MqttAgentRow
from schemas.streams.agents.participants import ParticipantRow
from schemas.streams.control.limits import LimitRow
from schemas.streams.control.organism import ListenerRow
from schemas.streams.principal.principals import PrincipalRow
from schemas.streams.webhook.webhook_registry import WebhookRow

_T = TypeVar("_T")

_ROWS: Final = (AgentRow, LimitRow, ListenerRow, MqttAgentRow, ParticipantRow, PrincipalRow, WebhookRow)
_VIEWS: Final = frozenset(row.VIEW for row in _ROWS)
_MOST: Final = 50_000
_UNKNOWN: Final = object()


class NameFacts:
    """Facts of names that depend on rows of principals, participants, agents, listeners, webhooks and limits.

    Thread-safe.

    Args:
        get: The look-up of rows, such as `LiveView.get`.
    """

    follows = _ROWS

    def __init__(self, get: GetRow) -> None:
        self._get = get
        self._known: dict[tuple[Any, str], Any] = {}
        self._lock = threading.Lock()
        self._changes = 0

    def changed(self, change: AppliedChange) -> None:
        """Forget all facts if a row has changed that they may depend on. The live view calls it."""
        if change.view in _VIEWS:
            with self._lock:
                self._changes += 1
                self._known.clear()

    def of(self, fact: Callable[[GetRow, str], _T], name: str) -> _T:
        """Return a fact of a name: what `fact` returns for the look-up of rows and the name."""
        found: Any = self._known.get((fact, name), _UNKNOWN)
        if found is not _UNKNOWN:
            return found  # type: ignore[no-any-return]
        changes, found = self._changes, fact(self._get, name)
        with self._lock:
            if len(self._known) >= _MOST:
                self._known.clear()
            if changes == self._changes:
                self._known[fact, name] = found
        return found  # type: ignore[no-any-return]
