"""The doctor's check of the tables: ledger and views keep up with the log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from connectors.cli.doctor.doctor_findings import OK, START, WARN, Finding
from connectors.live.table_progress_reader import LedgerProgressReader, ViewProgressReader
from connectors.local_stack import control
from connectors.local_stack.part_plan import STREAMS
from schemas.errors import TrunklineError
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import KafkaSettings, Settings

# A record that is in the log for so long and not in a table has been waiting for more than a slow micro-batch.
BEHIND_S: Final = 60


def check_tables(settings: Settings, behind_s: float = BEHIND_S) -> Finding:
    """Ledger and views have all records that have been in the log for longer than `behind_s` seconds."""
    ledger, views = LedgerProgressReader(settings).read(), ViewProgressReader(settings).read()
    try:
        old = old_records(settings.kafka, time.time() - behind_s)
    except TrunklineError as error:
        return Finding("tables", WARN, f"how far they are is not known: {error}", "see kafka")
    tables = {
        "the ledger": {} if ledger is None else ledger.ends,
        "the views": {} if views is None else views.offsets,
    }
    missing = {name: _missing(old, ends) for name, ends in tables.items()}
    newest = ""
    if ledger is not None and ledger.committed_at_s is not None:
        ago_s = max(0, round(time.time() - ledger.committed_at_s))
        newest = f"; the newest micro-batch was committed {ago_s} s ago"
    if not any(missing.values()):
        return Finding("tables", OK, f"ledger and views have all that is older than {behind_s:g} s{newest}")
    lacking = " and ".join(f"{count} are not in {name}" for name, count in missing.items() if count)
    found = f"of the log's records that are older than {behind_s:g} s, {lacking}{newest}"
    return Finding("tables", WARN, found, _mend(settings))


def old_records(kafka: KafkaSettings, before_s: float) -> dict[int, int]:
    """Return per partition the offset below which all records were logged before a moment of Kafka's clock
    (seconds since 1970 UTC). Raises BackboneUnreachable.
    """
    with topic_reader(kafka) as consumer:
        partitions = sorted(consumer.assignment())
        ends = consumer.end_offsets(partitions)
        first = consumer.offsets_for_times(dict.fromkeys(partitions, round(before_s * 1000)))
        return {at.partition: ends[at] if first[at] is None else first[at].offset for at in partitions}


def _missing(old: Mapping[int, int], ends: Mapping[int, int]) -> int:
    return sum(max(0, end - ends.get(partition, 0)) for partition, end in old.items())


def _mend(settings: Settings) -> str:
    state = control.running_state(settings)
    if state is None or STREAMS not in state["parts"]:
        return START
    return f"look at {STREAMS}: trunkline logs {STREAMS}, and whether other programs take its processor time"
