"""Ledger and view tables whose files were written by every writer there is, and what they must say.

Ledger files come from the settling tasks (append) and from compaction, files of views from delta-rs's WRITE,
MERGE and OPTIMIZE. A MERGE writes other Arrow types than the others (`string_view`, nullable). No program
merges into the ledger, but it gets such a file here: readers depend on the table's schema, not on a file's.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from connectors.doors.mqtt_bridge.bridge_records import job_event_record
from jobs import build_views
from jobs.build_views import ViewBuilder
from jobs.maintain_tables import tidy_ledger, tidy_views
from jobs.settling.fold_run import settle_run
from jobs.views.view_changes import key_columns
from schemas.fold.entries import Entries
from schemas.keys.record_macs import GATEWAY
from schemas.keys.sealing import ensure_keyring
from schemas.streams.mailboxes.mailbox_bodies import MessageReading
from schemas.streams.mailboxes.message import Message
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER, LedgerRow
from schemas.wire.record import OutgoingRecord, Record, partition_for
from tests.audited_ledger import AuditedLedger
from tests.jobs.topic_load import event, registration
from tests.random_log import RandomLog
from tests.raw_records import raw, with_mac
from trunkline_agent.wire.topics import events_topic

FIRST_MOMENT_US = 1_790_000_000_000_000
STEP_US = 250_000
# A job with one event as the bridge appends it.
JOB = "ab12cd34"


class MixedTables:
    """A ledger with audit roots and the views of it, grown micro-batch by micro-batch."""

    def __init__(self, folder: Path) -> None:
        self.ledger = AuditedLedger(folder)
        self.settings = self.ledger.settings
        self.keyring = ensure_keyring(self.settings)
        self.rows: list[LedgerRow] = []
        self._random = RandomLog(5, self.keyring)
        self._entries: dict[bytes | None, Entries] = {}
        self._partitions = self.settings.kafka.partitions
        self._ends = [0] * self._partitions
        build_views.prepare(self.settings)
        self.builder = ViewBuilder(self.settings)

    def settle(self, *records: OutgoingRecord, others: int = 0) -> None:
        """Settle `records` and as many random ones as `others` says in one micro-batch, and build the views.

        Records that name their partition are those of the operator about MACs. They get a MAC.
        """
        mac_key = self.keyring.mac_key(GATEWAY)
        own = [
            (raw(one), None) if one.partition is None else (with_mac(raw(one), mac_key), one.partition)
            for one in records
        ]
        mine: list[list[Record]] = [[] for _ in range(self._partitions)]
        for (key, value, headers), named in itertools.chain(
            own, zip(self._random.records(others), itertools.repeat(None))
        ):
            partition = partition_for(key or b"", self._partitions) if named is None else named
            names, values = tuple(name for name, _ in headers), tuple(value for _, value in headers)
            offset, self._ends[partition] = self._ends[partition], self._ends[partition] + 1
            moment = FIRST_MOMENT_US + sum(self._ends) * STEP_US
            mine[partition].append(
                Record(self.settings.kafka.topic, partition, offset, moment, key, value, names, values)
            )
            self._entries.setdefault(key, Entries())
        tasks = [settle_run(part, self._entries.__getitem__, self.keyring) for part in mine]
        self.ledger.commit(*tasks)
        self.rows += sorted(itertools.chain(*tasks), key=lambda row: row.logged_at)
        while self.builder.build():
            pass

    def tidy(self) -> None:
        """Run maintenance once."""
        tidy_views(self.builder, 1)
        tidy_ledger(self.settings)

    def merge_ledger(self) -> None:
        """Write the file with the newest row of the ledger anew, with the same rows, by a MERGE."""
        table, newest = DeltaTable(self.settings.table_path(LEDGER)), self.rows[-1]
        at = (pc.field("partition") == newest.partition) & (pc.field("offset") == newest.offset)
        rows = dataset_of(table).to_table(filter=at)
        merger = table.merge(rows, "t.partition = s.partition AND t.offset = s.offset", "s", "t")
        merger.when_matched_update_all().execute()
        while self.builder.build():
            pass

    def view(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the rows of a view by key, from the changes in the ledger alone; times are microseconds."""
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            for change in json.loads(row.changes or "[]"):
                if change["view"] == name:
                    found[change["key"]] = change["row"]
        return {key: row for key, row in found.items() if row is not None}

    def writers(self, table: str) -> dict[str, set[tuple[str, bool]]]:
        """The operations that wrote the live files, with the Arrow types of a required text column in these.

        Each type comes with whether it is nullable there.
        """
        path = Path(self.settings.table_path(table))
        column = "verdict" if table == LEDGER else key_columns(table)[-1]
        operations: dict[str, str] = {}
        for commit in sorted(path.glob("_delta_log/*.json")):
            actions = [json.loads(line) for line in commit.read_text().splitlines()]
            (operation,) = [action["commitInfo"]["operation"] for action in actions if "commitInfo" in action]
            operations |= {action["add"]["path"]: operation for action in actions if "add" in action}
        found: dict[str, set[tuple[str, bool]]] = {}
        for name in pa.table(DeltaTable(path).get_add_actions(flatten=True))["path"].to_pylist():
            field = pq.read_schema(path / unquote(name)).field(column)
            found.setdefault(operations[name], set()).add((str(field.type), field.nullable))
        return found


def message(number: int, to: str = "ann") -> OutgoingRecord:
    """The posting of a message."""
    said = {"message_id": f"n-{number}", "from": "bob", "to": to, "kind": "ask", "body": f"body {number}"}
    return Message.model_validate(said).record(door="http", principal="bob")


def read(number: int) -> OutgoingRecord:
    """Ann marks a message as read."""
    return MessageReading(to="ann", message_id=f"n-{number}").record(door="http", principal="ann")


def mixed_tables(folder: Path) -> MixedTables:
    """Tables of some hundred records; the ledger and `mailbox` have live files of each kind."""
    made = MixedTables(folder)
    prefix = made.settings.mqtt.topic_prefix
    started = job_event_record(prefix, events_topic(prefix, JOB), event(JOB, 1, "started").value, None)
    made.settle(registration(JOB, made.keyring), started, message(0), message(1), others=200)
    made.settle(read(0), others=100)
    made.settle(message(2))
    made.tidy()
    # From here on the files that maintenance has made stay: each MERGE rewrites what an append has written.
    made.settle(message(3))
    made.merge_ledger()
    made.settle(read(3))
    made.settle(message(4, to="eve"))
    made.ledger.keep()
    return made
