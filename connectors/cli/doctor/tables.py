"""Checks of `trunkline doctor` on tables, blobs and anchors.

Each returns a Finding: ok, or a fault and its repair. Anchors are signatures of the audit chain.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Final

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url
from pyarrow.fs import FileSelector

from connectors.cli.doctor.findings import START, Checks, Finding, check_part, fail, is_started, ok, warn
from connectors.hub.live.table_progress_reader import LedgerProgressReader, ViewProgressReader
from connectors.programs.local_stack.part_plan import STREAMS
from schemas.integrity.audit_anchors import anchors_file, chain_file, is_beside_the_ledger, newest_anchor
from schemas.integrity.audit_chain import last_in_file
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import KafkaSettings, Settings
from schemas.streams.blob.blobs import BLOBS, STORED
from schemas.streams.fold import VIEW_TABLES
from schemas.tables.delta_files import is_table, reason_of, rows_at, table_storage
from trunkline_agent.errors import TrunklineError
from trunkline_agent.terminal_text import escaped

# A record that waits longer than this does not only wait for a slow micro-batch.
BEHIND_S: Final = 60
# An anchor is due after one interval; on a busy machine it may come late.
_INTERVALS: Final = 3
_CLOCK_S: Final = 60
_ANSWER_S: Final = 10
CHECKS: Final = Checks()
CHECKS.add(STREAMS)(partial(check_part, part=STREAMS))


@CHECKS.add("views")
def check_views(settings: Settings) -> Finding:
    """Check that the Delta tables of all views exist; a missing one is a warning."""
    missing = [name for name in VIEW_TABLES if not is_table(settings.table_path(name))]
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


@CHECKS.add("object store")
def check_object_store(settings: Settings) -> Finding:
    """Check an object store of the tables: it writes, lists, refuses to write over an object, and has the time.

    An object below a folder `_doctor` is written twice with the condition that it is not there, and deleted. If
    both succeed, the store knows no conditional put, and two writers could lose each other's commits. A clock
    that differs by more than a minute is a warning. Tables on a local disk are ok.
    """
    root = settings.tables_root
    if "://" not in root:
        return ok("the tables are on a local disk")
    name = f"_doctor/{uuid.uuid4().hex}"
    try:
        # Not for long: the doctor waits.
        store = from_url(root, retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=_ANSWER_S)})
        store.put(name, b"", mode="create")
        try:
            is_careful = _refuses(store, name)
            written = [file for page in store.list("_doctor") for file in page if file["path"] == name]
        finally:
            store.delete(name)
    except (BaseError, OSError) as error:
        return fail(
            f"{root}: {escaped(reason_of(error))}",
            "look at its address and at the credentials in the environment",
        )
    if not is_careful:
        return fail(f"{root} writes over what is there", "take a store with conditional put (If-None-Match)")
    if not written:
        return fail(f"{root} does not list what it has written", "take a store that lists each object at once")
    ahead_s = written[0]["last_modified"].timestamp() - time.time()
    if abs(ahead_s) > _CLOCK_S:
        return warn(f"the clock of {root} differs from this machine's by {ahead_s:.0f} s", "set clocks by NTP")
    return ok(f"{root} writes, lists, and refuses to write over an object")


def _refuses(store: ObjectStore, name: str) -> bool:
    try:
        store.put(name, b"", mode="create")
    except AlreadyExistsError:
        return True
    return False


@CHECKS.add("blobs")
def check_blobs(settings: Settings) -> Finding:
    """Check that each stored blob of the view `blobs` has its object, of the right length.

    A missing object is a warning.
    """
    root = settings.blobs_root
    stored = stored_objects(settings)
    if stored is None:
        return ok(f"below {root}; the view that names them is not there yet")
    there = table_storage(root).get_file_info(FileSelector("", allow_not_found=True))
    sizes = {file.base_name: file.size for file in there}
    lost = [name for name, size in stored.items() if sizes.get(name) != size]
    if lost:
        found = f"{len(lost)} of {len(stored)} blobs have no whole object below {root}, such as {lost[0]}"
        return warn(
            found, "if it stays so, put the objects back from a backup, or let the senders upload again"
        )
    return ok(f"{len(stored)} blobs below {root}")


def stored_objects(settings: Settings) -> dict[str, int] | None:
    """Return the objects of all stored blobs with their lengths in bytes, by the view `blobs`.

    The result is None if the view does not exist yet. Raises TrunklineError if it is unreadable.
    """
    found = rows_at(settings.table_path(BLOBS), ["status", "object", "bytes"])
    if found is None:
        return None
    return {row["object"]: row["bytes"] for row in found.to_pylist() if row["status"] == STORED}


@CHECKS.add("anchors")
def check_anchors(settings: Settings) -> Finding:
    """Check that the newest anchor signs the whole audit chain, or that the next one is not overdue.

    A chain that is shorter than the anchor says, or an overdue anchor of a running stack, is a failure. A
    missing file of anchors, or an overdue anchor while the stack is down, is a warning.
    """
    path = anchors_file(settings)
    if not path.exists():
        return warn(f"{path} is not there yet", "the streams make it with the first rows")
    newest = newest_anchor(path)
    if newest is None:
        return fail(f"{path} holds no anchor", "./trunkline audit verify says what is left")
    signed = newest.statement
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
    place = anchors_file(settings)
    if is_beside_the_ledger(settings, place):
        found = f"{place} is beside the ledger: its end could be cut off with its anchors, unseen"
        return warn(found, "set audit.anchors_dir (docs/how-to/verify_the_ledger.md)")
    return ok(f"{place}, apart from the ledger")
