"""Finds where and when one event was stored, from the Kafka record to the views, for the custody notebook.

The notebook shows the commits of the ledger and of the views, Kafka's copy of the record, and a refold. Commits
are found in the Delta log, which keeps them for an hour after a checkpoint. For an older commit, the time of
the step is unknown.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from kafka import TopicPartition
from pyarrow.fs import FileSelector, FileSystem, FileType

from notebooks.audit_tables import POSITION, Audit
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring, load_keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import SettingsError
from schemas.streams.control.record_macs import MACS
from schemas.streams.fold import STREAM_ENTRIES, settle
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.delta_files import dataset_of_files, table_storage
from schemas.tables.ledger import COLUMNS, LEDGER, LedgerRow, record_of_row
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.ids import CONTROL

# The greatest difference between the clocks of Kafka and of the committing job.
_CLOCKS_APART = pd.Timedelta(seconds=60)
_KAFKA_WAIT_S = 10.0


class Commit(NamedTuple):
    """One commit of a Delta table.

    `actions` are the JSON objects of the commit's file in the Delta log.
    """

    version: int
    committed_at: pd.Timestamp
    actions: list[dict[str, Any]]

    def named(self, kind: str) -> list[dict[str, Any]]:
        """Return the bodies of this commit's actions of one kind; an empty list if there are none.

        `kind` is the name of an action in Delta's protocol, such as `add` or `txn`.
        """
        return [action[kind] for action in self.actions if kind in action]


def _commit(storage: FileSystem, version: int) -> Commit | None:
    path = f"_delta_log/{version:020d}.json"
    if storage.get_file_info([path])[0].type != FileType.File:
        return None
    with storage.open_input_stream(path) as stream:
        actions = [json.loads(line) for line in stream.read().splitlines() if line]
    stamps = [action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action]
    return Commit(version, pd.Timestamp(stamps[0] if stamps else 0, unit="ms", tz="UTC"), actions)


def commits_since(path: str, moment: pd.Timestamp) -> Iterator[Commit]:
    """Yield the commits of the Delta table at `path`, oldest first, from a minute before `moment` on.

    Commits that were removed from the Delta log are skipped. A table that does not exist has no commits.
    """
    storage = table_storage(path)
    files = storage.get_file_info(FileSelector("_delta_log", allow_not_found=True))
    versions = sorted(int(f.base_name[:20]) for f in files if f.base_name[20:] == ".json")

    def is_late(version: int) -> bool:
        commit = _commit(storage, version)
        return commit is not None and commit.committed_at >= moment - _CLOCKS_APART

    for version in versions[bisect_left(versions, True, key=is_late) :]:
        commit = _commit(storage, version)
        if commit is not None:
            yield commit


def _added(commit: Commit) -> Iterator[tuple[str, dict[str, Any]]]:
    for add in commit.named("add"):
        # A compaction writes old rows into new files, without `dataChange`.
        if add["dataChange"]:
            yield unquote(add["path"]), json.loads(add.get("stats") or "{}")


def ledger_commit(audit: Audit, partition: int, offset: int, logged_at: pd.Timestamp) -> Commit | None:
    """Return the commit that added one row to the ledger, or None if it cannot be found.

    It cannot be found if the ledger does not exist, or if maintenance removed the commit from the Delta log or
    deleted its data file.

    Args:
        audit: The opened tables.
        partition: The Kafka partition of the row.
        offset: The Kafka offset of the row.
        logged_at: The row's time in Kafka, at which the search begins.
    """
    if audit.version(LEDGER) is None:
        return None
    path = audit.path(LEDGER)
    storage = table_storage(path)
    row = (pc.field("partition") == partition) & (pc.field("offset") == offset)
    for commit in commits_since(path, logged_at):
        for file, bounds in _added(commit):
            least, most = bounds.get("minValues", {}), bounds.get("maxValues", {})
            if not least.get("offset", offset) <= offset <= most.get("offset", offset):
                continue
            if storage.get_file_info([file])[0].type != FileType.File:
                continue
            found = dataset_of_files(storage, [file], LEDGER_ARROW)
            if found.count_rows(filter=row):
                return commit
    return None


def views_commit(audit: Audit, partition: int, offset: int, logged_at: pd.Timestamp) -> Commit | None:
    """Return the first commit of `stream_entries` after which all views contained one ledger row.

    None means that there are no views, that they do not contain the row yet, or that the commit was removed
    from the Delta log.

    Args:
        audit: The opened tables.
        partition: The Kafka partition of the row.
        offset: The Kafka offset of the row.
        logged_at: The row's time in Kafka, at which the search begins.
    """
    if audit.version(STREAM_ENTRIES) is None:
        return None
    name = f"trunkline/offset/{partition}"
    for commit in commits_since(audit.path(STREAM_ENTRIES), logged_at):
        if any(txn["appId"] == name and txn["version"] > offset for txn in commit.named("txn")):
            return commit
    return None


def settle_times(audit: Audit, around: pd.Timestamp, most: int = 200) -> pd.DataFrame:
    """Return how many seconds ledger rows took from Kafka's time to their commit in the ledger.

    Args:
        audit: The opened tables.
        around: Begin with the commits of about this time.
        most: Read at most this many commits.

    Returns:
        The columns `partition`, `offset` and `seconds`, with a row for each ledger row of these commits.
    """
    parts = [pd.DataFrame({"partition": [], "offset": [], "seconds": []}).astype({"seconds": float})]
    if audit.version(LEDGER) is None:
        return parts[0]
    storage = table_storage(audit.path(LEDGER))
    for number, commit in enumerate(commits_since(audit.path(LEDGER), around)):
        if number >= most:
            break
        files = [file for file, _ in _added(commit) if storage.get_file_info([file])[0].type == FileType.File]
        if files:
            found = dataset_of_files(storage, files, LEDGER_ARROW)
            rows = found.to_table(columns=[*POSITION, "logged_at"]).to_pandas()
            rows["seconds"] = (commit.committed_at - rows.pop("logged_at")).dt.total_seconds()
            parts.append(rows)
    return pd.concat(parts[1:] or parts, ignore_index=True)


def own_keyring(audit: Audit) -> Keyring | None:
    """Return the master keys that unseal masked records.

    None means that the key file, or the variable of the environment with the keys, is missing or invalid.
    """
    try:
        return load_keyring(audit.settings)
    except SettingsError:
        return None


def stream_rows(audit: Audit, kind: str, name: str, last_offset: int) -> list[LedgerRow]:
    """Return all ledger rows of one stream up to and including `last_offset`, in the order of the log.

    `kind` and `name` identify the stream, such as `job` and `0a1b2c3d`. The result is empty if there is no such
    stream. The window of time of `audit` does not apply.
    """
    where = (pc.field("stream_kind") == kind) & (pc.field("stream_id") == name)
    where &= pc.field("offset") <= last_offset
    found = audit.arrow(LEDGER, list(COLUMNS), where).sort_by("offset")
    moments = found["logged_at"].cast(pa.int64())
    found = found.set_column(found.schema.get_field_index("logged_at"), "logged_at", moments)
    columns = [found.column(column).to_pylist() for column in COLUMNS]
    return list(map(LedgerRow._make, zip(*columns, strict=True)))


def rows_about_macs(audit: Audit, partition: int, last_offset: int) -> list[LedgerRow]:
    """Return the ledger rows that say which MACs the records of a partition need, up to `last_offset`."""
    return stream_rows(audit, CONTROL, f"{MACS}{partition}", last_offset)


def refolded(rows: list[LedgerRow], about_macs: list[LedgerRow], keyring: Keyring) -> Settled | None:
    """Settle the records of these rows again with the current fold, and return the last record's result.

    Args:
        rows: All rows of one stream up to the record in question, in the order of the log.
        about_macs: The rows of the same partition that `rows_about_macs` returns, up to the same record.
        keyring: The master keys.

    Returns:
        The last record's verdict, reason and changes. None: `rows` is empty.

    Raises:
        UnsealError: A masked record cannot be unsealed with these keys.
        ValueError: A row cannot be turned back into its record.
    """
    entries, macs, settled = Entries(), Entries(), None
    own = {row.offset for row in rows}
    others = [row for row in about_macs if row.offset not in own]
    for row in sorted([*rows, *others], key=lambda row: row.offset):
        is_about_macs = row.stream_kind == CONTROL and row.stream_id.startswith(MACS)
        state = macs if is_about_macs else entries
        outcome = settle(record_of_row(row, keyring), state, keyring, macs)
        settled = outcome if row.offset in own else settled
    return settled


class KafkaCopy(NamedTuple):
    """One record as Kafka has it: value, key, headers and Kafka's time."""

    value: bytes | None
    key: bytes | None
    headers: dict[str, str]
    logged_at: pd.Timestamp


def kafka_copy(audit: Audit, partition: int, offset: int) -> KafkaCopy | str:
    """Read one record from Kafka. Return it, or a sentence that says why it cannot be read.

    The call waits at most ten seconds for the record. The caller tells the results apart by their type.
    """
    kafka = audit.settings.kafka
    try:
        with topic_reader(kafka, [partition]) as consumer:
            (assigned,) = consumer.assignment()
            if not offset < consumer.end_offsets([assigned])[assigned]:
                return f"Kafka at {kafka.bootstrap_servers} has another log: it ends before this offset"
            consumer.seek(TopicPartition(kafka.topic, partition), offset)
            deadline = time.monotonic() + _KAFKA_WAIT_S
            while time.monotonic() < deadline:
                for batch in consumer.poll(timeout_ms=500, max_records=1).values():
                    record = batch[0]
                    if record.offset != offset:
                        return "Kafka does not have this record any more"
                    headers = {name: value.decode("utf-8", "replace") for name, value in record.headers}
                    logged_at = pd.Timestamp(record.timestamp, unit="ms", tz="UTC")
                    return KafkaCopy(record.value, record.key, headers, logged_at)
    except BackboneUnreachable:
        return f"Kafka does not answer at {kafka.bootstrap_servers}"
    return "Kafka did not hand the record out in time"
