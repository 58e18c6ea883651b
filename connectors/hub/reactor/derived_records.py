"""The driver of the rules that the kinds of streams declare: all records that follow from a settled one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from connectors.hub.reactor.xml_records import XML_FOLLOWS
from schemas.effects.effects import FOLLOWS
from schemas.effects.following import DOOR, Cause, Follows, GetRow, Related
from schemas.wire.record import BadEnvelopeError, OutgoingRecord, Record, read_envelope
from trunkline_agent.wire.ids import parse_stream_key

_NOTICES_MOST: Final = 10_000
_RULES: Final[dict[tuple[str, str], list[Follows]]] = {}
for _kind, _rules in (*FOLLOWS.items(), *XML_FOLLOWS.items()):
    for _rule in _rules:
        for _type in _rule.types:
            _RULES.setdefault((_kind, _type), []).append(_rule)


def cause_of(record: Record, get: GetRow, related: Related) -> Cause | None:
    """Return a record as the rules get it, or None if nothing can follow from it. See `Cause`."""
    stream = parse_stream_key(record.key)
    if stream is None:
        return None
    try:
        return Cause(record, read_envelope(record), *stream, get, related)
    except BadEnvelopeError:
        return None


def derived_records(cause: Cause, ask: Callable[[Cause], object]) -> list[OutgoingRecord]:
    """Return the records that the reactor has to append because a record was settled. Usually there are none.

    Args:
        cause: The settled record.
        ask: Sets the verdict of `cause`. It is called only if a rule needs it, because it may have to wait.
    """
    found: list[OutgoingRecord] = []
    for rule in _RULES.get((cause.kind, cause.record_type), ()):
        if rule.asks is not None:
            if not rule.asks(cause):
                continue
            if cause.verdict is None:
                ask(cause)
        found += rule.derive(cause)
    return found


class FewNotices:
    """The newest notices that the reactor of this process has derived (LM-05). Thread-safe.

    The sender of an MQTT message gets one notice a minute of the full mailbox of each recipient.

    All refusals of a sender, recipient and minute have a notice with the same id, and only the first is
    appended. If its cause comes again, the same notice is derived again, as the fold's duplicate.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._causes: OrderedDict[str, bytes | None] = OrderedDict()

    def first(self, records: Iterable[OutgoingRecord]) -> list[OutgoingRecord]:
        """Return the records without those whose id was used for another content before."""
        found = []
        with self._lock:
            for record in records:
                if record.door == DOOR:
                    known = self._causes.setdefault(record.ce_id, record.value)
                    if known != record.value:
                        continue
                    if len(self._causes) > _NOTICES_MOST:
                        self._causes.popitem(last=False)
                found.append(record)
        return found
