"""Carriers of one session, without limits and without a gateway unless a test gives them some."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from connectors.doors.file_bridge.posting_rules import BridgeRules, GatewayBlobs
from connectors.doors.file_bridge.session_carrier import Carry, SessionCarrier
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord, Position
from trunkline_agent.errors import BackboneUnreachable


class NoVerdicts:
    """A gateway that does not answer."""

    up = False

    def ask(self, position: Position, answer: Callable[[str | None, str | None], None]) -> None:
        """Answer at once."""
        answer(None, None)


NO_RULES: Any = BridgeRules(NoVerdicts())


class Log:
    """Keeps what is appended; `then` happens after it, before the carrier knows of it."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.records: list[OutgoingRecord] = []
        self.then = then

    @property
    def ids(self) -> list[str]:
        """The ids of the records."""
        return [record.ce_id for record in self.records]

    def append(self, records: Sequence[OutgoingRecord]) -> list[str | None]:
        """Take the records."""
        self.records += records
        self.then()
        return [None] * len(records)


def carrier(root: Path, carry: Carry, blobs: Any = None, rules: Any = NO_RULES) -> SessionCarrier:
    """A carrier of the session `default`, whose messages no table has."""
    blobs = blobs or GatewayBlobs(Settings(), lambda: False)
    known, stop = lambda _realm, _ids: set(), threading.Event()
    return SessionCarrier(str(root), "default", carry, known, stop, rules, blobs)


def killed() -> None:
    """Fail as a carrier does that is killed before its cursor moves."""
    raise BackboneUnreachable("killed here")
