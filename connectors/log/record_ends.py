"""The ends of the log's records, for a program that has settled the log up to some offsets.

The end of a transaction takes an offset without being a record, so no program ever settles it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Final

from connectors.log.live_tail import LogTail, OffsetsGoneError
from connectors.log.log_end import LogEnd
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import KafkaSettings, Settings

_REACH_S: Final = 10.0
_LOOK_S: Final = 20.0
_POLL_S: Final = 0.2


def record_ends(settings: Settings, settled: Mapping[int, int]) -> dict[int, int]:
    """Return the log's end by partition, or the offset in `settled` where no record follows it.

    Raises BackboneUnreachable, and as `check_topic`.
    """
    check_topic(settings)
    with closing(LogEnd(settings.kafka)) as log_end:
        ends = log_end.offsets(_REACH_S)
    behind = {number: settled.get(number, 0) for number, end in ends.items() if settled.get(number, 0) < end}
    return ends | (_without_records(settings.kafka, behind, ends) if behind else {})


def _without_records(
    kafka: KafkaSettings, behind: Mapping[int, int], ends: Mapping[int, int]
) -> dict[int, int]:
    """Return the part of `behind` after which the log has no record, as far as that can be read in time."""
    found: dict[int, int] = {}
    unseen, deadline = set(behind), time.monotonic() + _LOOK_S
    # Offsets that the log no longer has were records.
    with LogTail(kafka, {**ends, **behind}) as tail, suppress(OffsetsGoneError):
        while unseen and time.monotonic() < deadline:
            unseen -= {record.partition for record in tail.poll(_POLL_S)}
            found |= {n: behind[n] for n in unseen if tail.reached.get(n, 0) >= ends[n]}
            unseen -= found.keys()
    return found
