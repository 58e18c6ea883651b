"""The audit log of messages (HH-08): an entry for each delivered message and each refused request to send one.

The newest entries are in memory; all of them are in the ledger. The reason is the only text of a refusal's
record that describes the request, so it starts with the recipient and the type of the message. Thus the log,
the ledger and the audit log of every gateway have them.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.live.table_reader import newest_settled
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.refused.refusal import REQUEST_REFUSED
from schemas.wire.record import Position
from schemas.wire.wire_body import NOTE_LIMIT
from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.job_event import has_control_characters
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED

_ROUTE: Final = "POST /api/hub/messages"
_KIND_LIMIT: Final = 128
# The forms of this project's tokens: a task's (a UUID) and a principal's (32 bytes in URL-safe base64).
_MAY_BE_TOKEN: Final = re.compile(
    r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}|[A-Za-z0-9_-]{43}", re.IGNORECASE
).search
_ABOUT: Final = re.compile(
    r"message(?: to (?P<recipient>[A-Za-z0-9][A-Za-z0-9._-]*))?"
    r'(?: of type (?P<kind>"(?:[^"\\]|\\.)*"))?: (?P<why>.*)',
    re.DOTALL,
).fullmatch
# The records of such messages are kept as they are, and an entry is made of one when it is read.
_SMALL_BYTES: Final = 2048
_Entry = tuple[int, Position, SettledRecord | dict[str, Any]]
"""The time of the record, its position, and the entry as JSON or the record that it is made of."""


class AuditLog:
    """The newest entries of the audit log in memory, at most `most` of them. Thread-safe.

    The entries are made of settled records, so all gateways show the same ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        # Sorted by time, because the log arrives partition by partition at the start.
        self._entries: list[_Entry] = []

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Add an entry for each settled message and each recorded refusal to send one. Ignores other records.

        The live view's thread calls this method with each batch of settled records.
        """
        for record in records:
            entry = record if _is_small_message(record) else entry_of(record)
            if entry is not None:
                self._add((record.logged_at_us, record.position, entry))

    def load(self, settings: Settings) -> None:
        """Add the newest entries of the ledger, which were settled before this gateway started.

        Entries that are in memory already are not added again. Blocks while it reads the ledger, so call it in
        a thread of its own. Raises TrunklineError if the ledger cannot be read.
        """
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
        """Return the newest `limit` entries in memory as JSON, oldest first. None means all of them.

        An entry has the keys that `entry_of` describes. The list is empty while there is no entry.
        """
        with self._lock:
            found = [entry for _, _, entry in (self._entries if limit is None else self._entries[-limit:])]
        entries = [entry_of(one) if isinstance(one, SettledRecord) else one for one in found]
        return [one for one in entries if one is not None]


def _is_small_message(record: SettledRecord) -> bool:
    is_message = record.type == MESSAGE_POSTED and record.verdict in (ACCEPTED, REJECTED)
    return is_message and len(record.value or b"") <= _SMALL_BYTES


def _when(entry: _Entry) -> tuple[int, Position]:
    return entry[0], entry[1]


def entry_of(record: SettledRecord) -> dict[str, Any] | None:
    """Return the audit log's entry for a settled record as JSON.

    An entry has `at`, `verdict` (`delivered` or `rejected`), `sender`, `recipient`, `type`, `message_id`,
    `reason` and `why`. For a replay, `why` names the dead message and the client. Returns None unless the
    record is an accepted or rejected message, or a refused request to send one.
    """
    if record.type == MESSAGE_POSTED and record.verdict in (ACCEPTED, REJECTED):
        body = _body(record)
        # The sender is that of the dead message, so the entry must also name the client that replayed it.
        replay = f"replay of {body['replay_of']} by {record.principal}" if "replay_of" in body else None
        return _entry(
            record,
            why=record.why or replay,
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


class RefusedMessage(NamedTuple):
    """The parsed explanation that was recorded for a refused message.

    `recipient` and `kind` (the message's type) are None if the explanation does not name them. `why` is the
    rest of the explanation.
    """

    recipient: str | None
    kind: str | None
    why: str


def why_refused(envelope: Any, why: str) -> str:
    """Return the explanation to record for a refused message, such as `message to bo of type "note": <why>`.

    The recipient or the type is left out if it is missing, invalid or looks like a token, because no token may
    be recorded. If both are left out, `why` is returned unchanged.

    Args:
        envelope: The decoded JSON body of the request, valid or not.
        why: The reason of the refusal. A text with recipient or type is cut to 500 characters.
    """
    fields = envelope if isinstance(envelope, dict) else {}
    recipient, kind = fields.get("recipient"), fields.get("type")
    to = f" to {recipient}" if _is_recipient(recipient) else ""
    of_type = f" of type {json.dumps(kind, ensure_ascii=False)}" if _is_kind(kind) else ""
    return f"message{to}{of_type}: {why}"[:NOTE_LIMIT] if to or of_type else why


def read_refused(why: str) -> RefusedMessage:
    """Parse an explanation that `why_refused` has made into recipient, type and the rest.

    For a text of any other form, recipient and type are None, and `why` is the whole text.
    """
    found = _ABOUT(why)
    if found is None:
        return RefusedMessage(None, None, why)
    kind = found["kind"]
    return RefusedMessage(found["recipient"], None if kind is None else json.loads(kind), found["why"])


def _is_recipient(recipient: object) -> bool:
    return isinstance(recipient, str) and is_name(recipient) and _MAY_BE_TOKEN(recipient) is None


def _is_kind(kind: object) -> bool:
    if not isinstance(kind, str) or len(kind) > _KIND_LIMIT or _MAY_BE_TOKEN(kind) is not None:
        return False
    return not has_control_characters(kind.replace("\n", "").replace("\t", ""))
