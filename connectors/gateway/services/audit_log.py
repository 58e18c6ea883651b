"""The audit log of delivered and refused messages (HH-08).

The newest entries are in memory; all of them are in the ledger.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

import orjson

from connectors.gateway.services.refused_messages import read_refused
from connectors.gateway.web.answers import iso_moment
from connectors.live.settled_feed import SettledRecord
from connectors.live.verdict_reader import newest_settled
from connectors.log.publisher import Position
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.refused.refusal import REQUEST_REFUSED
from schemas.wire.verdicts import ACCEPTED, REJECTED

_ROUTE: Final = "POST /api/hub/messages"
_Entry = tuple[int, Position, dict[str, Any]]
"""The time of the record, its position, and the entry as JSON."""


class AuditLog:
    """The newest entries. They are made of settled records, so all gateways show the same. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        # Sorted by time, because the log arrives partition by partition at the start.
        self._entries: list[_Entry] = []

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Add the records that belong to the audit log."""
        for record in records:
            if record.type in (MESSAGE_POSTED, REQUEST_REFUSED):
                entry = entry_of(record)
                if entry is not None:
                    self._add((record.logged_at_us, record.position, entry))

    def load(self, settings: Settings) -> None:
        """Add the newest records that were settled before this gateway started. Raises TrunklineError."""
        for record_type in (MESSAGE_POSTED, REQUEST_REFUSED):
            self.settled(newest_settled(settings, record_type, self._most))

    def _add(self, new: _Entry) -> None:
        with self._lock:
            place = bisect_left(self._entries, _when(new), key=_when)
            # The ledger and the log may both bring the record.
            if place < len(self._entries) and _when(self._entries[place]) == _when(new):
                return
            self._entries.insert(place, new)
            del self._entries[: -self._most]

    def newest(self, limit: int | None) -> list[dict[str, Any]]:
        """Return the newest entries, oldest first. `limit`: the largest number; None for all in memory."""
        with self._lock:
            entries = [entry for _, _, entry in self._entries]
        return entries if limit is None else entries[-limit:]


def _when(entry: _Entry) -> tuple[int, Position]:
    return entry[0], entry[1]


def entry_of(record: SettledRecord) -> dict[str, Any] | None:
    """Return the entry of a settled record; None when the record is not part of the audit log."""
    if record.type == MESSAGE_POSTED and record.verdict in (ACCEPTED, REJECTED):
        body = _body(record)
        return _entry(
            record,
            verdict="delivered" if record.verdict == ACCEPTED else "rejected",
            sender=str(body.get("from", "")),
            recipient=body.get("to"),
            type=body.get("kind"),
            message_id=body.get("message_id"),
        )
    if record.type == REQUEST_REFUSED:
        body = _body(record)
        if body.get("route") == _ROUTE:
            refused = read_refused(record.why or "")
            return _entry(
                record,
                verdict="rejected",
                sender=str(body.get("principal", "")),
                recipient=refused.recipient,
                type=refused.kind,
                why=refused.why,
            )
    return None


def _entry(record: SettledRecord, **fields: Any) -> dict[str, Any]:
    unknown = {"recipient": None, "type": None, "message_id": None}
    common = {"at": iso_moment(record.logged_at_us), "reason": record.reason, "why": record.why}
    return {**unknown, **common, **fields}


def _body(record: SettledRecord) -> dict[str, Any]:
    try:
        body = orjson.loads(record.value or b"")
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}
