"""Checks of `trunkline doctor` on tables, blobs and anchors.

Each returns a Finding: ok, or a fault and its repair. Anchors are signatures of the audit chain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from connectors.cli.doctor.findings import START, Checks, Finding, check_part, fail, is_started, ok, warn
from connectors.hub.live.table_progress_reader import LedgerProgressReader, ViewProgressReader
from connectors.programs.local_stack.part_plan import STREAMS
from schemas.integrity.audit_anchors import anchors_file, chain_file, is_beside_the_ledger, read_anchors
from schemas.integrity.audit_chain import last_in_file
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.blob.blobs import BLOBS, STORED
from schemas.streams.fold import VIEW_TABLES
from schemas.tables.delta_files import rows_at
from trunkline_agent.errors import TrunklineError

# A record that waits longer than this does not only wait for a slow micro-batch.
BEHIND_S: Final = 60
# An anchor is due after one interval; on a busy machine it may come late.
_INTERVALS: Final = 3
CHECKS: Final = Checks()
CHECKS.add(STREAMS)(partial(check_part, part=STREAMS))


@CHECKS.add("views")
def check_views(settings: Settings) -> Finding:
    """Check that the Delta tables of all views exist; a missing one is a warning.

    Tables in object storage are not checked: they count as ok.
    """
    if "://" in settings.tables_root:
        return ok(f"below {settings.tables_root}, not looked into")
    missing = [name for name in VIEW_TABLES if not Path(settings.table_path(name), "_delta_log").is_dir()]
    if missing:
        found = f"not there yet: {', '.join(missing)}"
        started = is_started(settings, STREAMS)
        mend = f"trunkline logs {STREAMS} says why, if it stays so" if started else START
        return warn(found, mend)
    return ok(f"{len(VIEW_TABLES)} tables below {settings.tables_root}")


def check_tables(settings: Settings, behind_s: float = BEHIND_S) -> Finding:
    """Check that ledger and views have all records of the log that are older than `behind_s` seconds.

    Missing records are a warning, which says how many they are. If Kafka does not answer, the result is a
    warning, too. Raises TrunklineError if a table cannot be read.
    """
    ledger, views = LedgerProgressReader(settings).read(), ViewProgressReader(settings).read()
    try:
        old = old_records(settings.kafka, time.time() - behind_s)
    except TrunklineError as error:
        return warn(f"how far they are is not known: {error}", "see kafka")
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
        return ok(f"ledger and views have all that is older than {behind_s:g} s{newest}")
    lacking = " and ".join(f"{count} are not in {name}" for name, count in missing.items() if count)
    found = f"of the log's records that are older than {behind_s:g} s, {lacking}{newest}"
    return warn(found, _mend(settings))


# Not as a decorator, which would hide `behind_s`.
CHECKS.add("tables")(check_tables)


def old_records(kafka: KafkaSettings, before_s: float) -> dict[int, int]:
    """Return for each partition the offset of the first record that Kafka logged at `before_s` or later.

    If a partition has no such record, the offset is the partition's end. `before_s` is in seconds since 1970
    UTC by Kafka's clock. Raises BackboneUnreachable if Kafka does not answer.
    """
    with topic_reader(kafka) as consumer:
        partitions = sorted(consumer.assignment())
        ends = consumer.end_offsets(partitions)
        first = consumer.offsets_for_times(dict.fromkeys(partitions, round(before_s * 1000)))
        return {at.partition: ends[at] if first[at] is None else first[at].offset for at in partitions}


def _missing(old: Mapping[int, int], ends: Mapping[int, int]) -> int:
    return sum(max(0, end - ends.get(partition, 0)) for partition, end in old.items())


def _mend(settings: Settings) -> str:
    if not is_started(settings, STREAMS):
        return START
    return f"look at {STREAMS}: trunkline logs {STREAMS}, and whether other programs take its processor time"


@CHECKS.add("blobs")
def check_blobs(settings: Settings) -> Finding:
    """Check that each stored blob of the view `blobs` has its object, of the right length.

    A missing object is a warning. Objects in object storage are not checked: they count as ok.
    """
    root = settings.blobs_root
    if "://" in root:
        return ok(f"below {root}, not looked into")
    stored = stored_objects(settings)
    if stored is None:
        return ok(f"below {root}; the view that names them is not looked into")
    lost = [name for name, size in stored.items() if _size(Path(root, name)) != size]
    if lost:
        found = f"{len(lost)} of {len(stored)} blobs have no whole object below {root}, such as {lost[0]}"
        return warn(
            found, "if it stays so, put the objects back from a backup, or let the senders upload again"
        )
    return ok(f"{len(stored)} blobs below {root}")


def stored_objects(settings: Settings) -> dict[str, int] | None:
    """Return the objects of all stored blobs with their lengths in bytes, by the view `blobs`.

    The result is None if the view is in an object store, or does not exist yet. Raises TrunklineError if it is
    unreadable.
    """
    path = settings.table_path(BLOBS)
    found = None if "://" in path else rows_at(path, ["status", "object", "bytes"])
    if found is None:
        return None
    return {row["object"]: row["bytes"] for row in found.to_pylist() if row["status"] == STORED}


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


@CHECKS.add("anchors")
def check_anchors(settings: Settings) -> Finding:
    """Check that the newest anchor signs the whole audit chain, or that the next one is not overdue.

    A chain that is shorter than the anchor says, or an overdue anchor of a running stack, is a failure. A
    missing file of anchors, or an overdue anchor while the stack is down, is a warning.
    """
    path = anchors_file(settings)
    if not path.exists():
        return warn(f"{path} is not there yet", "the streams make it with the first rows")
    whole = [anchor for anchor in read_anchors(path) if anchor is not None]
    if not whole:
        return fail(f"{path} holds no anchor", "./trunkline audit verify says what is left")
    signed = whole[-1].statement
    chain = chain_file(settings, signed.table)
    last = last_in_file(chain)
    length = 0 if last is None else last.entry.number + 1
    age_s = max(0.0, time.time() - signed.time_us / 1e6)
    found = f"the newest of {path} signs {signed.length} commits, {age_s:.0f} s ago"
    if length < signed.length:
        found = f"{found}, and {chain} has {length}"
        return fail(found, "./trunkline audit verify says what is missing")
    if length == signed.length or age_s <= _INTERVALS * settings.audit.anchor_interval_s:
        return ok(found)
    found = f"{found}; {length - signed.length} have come since"
    if not is_started(settings, STREAMS):
        return warn(found, START)
    return fail(found, f"trunkline logs {STREAMS} says why: look for audit_trail")


@CHECKS.add("anchors place")
def check_anchors_place(settings: Settings) -> Finding:
    """Check that the anchors are stored apart from the ledger that they protect; otherwise it is a warning."""
    place = anchors_file(settings).parent
    if is_beside_the_ledger(settings, place):
        found = f"{place} is beside the ledger: its end could be cut off with its anchors, unseen"
        return warn(found, "set audit.anchors_dir (docs/how-to/verify_the_ledger.md)")
    return ok(f"{place}, apart from the ledger")
