"""Where the log's records end, for whoever has settled it up to some offsets.

What is no record, as the end of a transaction, takes an offset, too, and nobody ever settles it.
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
    """By partition, the log's end; what is in `settled` where no record comes after that.

    Raises BackboneUnreachable and what `check_topic` raises.
    """
    check_topic(settings)
    with closing(LogEnd(settings.kafka)) as log_end:
        ends = log_end.offsets(_REACH_S)
    behind = {number: settled.get(number, 0) for number, end in ends.items() if settled.get(number, 0) < end}
    return ends | (_without_records(settings.kafka, behind, ends) if behind else {})


def _without_records(
    kafka: KafkaSettings, behind: Mapping[int, int], ends: Mapping[int, int]
) -> dict[int, int]:
    """Those of `behind` after which there is no record. Where that cannot be seen there may be some."""
    found: dict[int, int] = {}
    unseen, deadline = set(behind), time.monotonic() + _LOOK_S
    # Offsets that the log no longer has were records that are missing.
    with LogTail(kafka, {**ends, **behind}) as tail, suppress(OffsetsGoneError):
        while unseen and time.monotonic() < deadline:
            unseen -= {record.partition for record in tail.poll(_POLL_S)}
            found |= {n: behind[n] for n in unseen if tail.reached.get(n, 0) >= ends[n]}
            unseen -= found.keys()
    return found
