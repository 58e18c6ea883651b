"""Few notices of full mailboxes: the sender of an MQTT message gets one a minute for each recipient (LM-05)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from connectors.hub.reactor.derived_records import DOOR
from schemas.wire.record import OutgoingRecord

_MOST: Final = 10_000


class FewNotices:
    """The newest notices that the reactor of this process has derived. Thread-safe.

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
                    if len(self._causes) > _MOST:
                        self._causes.popitem(last=False)
                found.append(record)
        return found
