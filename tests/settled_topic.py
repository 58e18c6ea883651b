"""A topic settled into a ledger and views without Spark: what the jobs do is called as they call it."""

from __future__ import annotations

from collections.abc import Callable

from deltalake import DeltaTable

from connectors.log.kafka_libraries import repair_kafka_client, to_record
from jobs.settling.fold_run import settle_run
from jobs.views.view_changes import CHANGE_COLUMNS, changes_of
from jobs.views.view_tables import open_tables
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import macs_stream
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.ledger import LEDGER, LedgerRow
from schemas.tables.view_progress import ViewProgress
from schemas.wire.record import Record
from tests.audited_ledger import AuditedLedger
from tests.raw_records import read_to_end


def records_in_topic(settings: Settings) -> dict[int, list[Record]]:
    """By partition, all records of the topic, with the names of their headers as Java reads them."""
    repair_kafka_client()
    found: dict[int, list[Record]] = {number: [] for number in range(settings.kafka.partitions)}
    for one in read_to_end(settings.kafka):
        found[one.partition].append(to_record(one))
    return found


def settled_rows(records: list[Record], keyring: Keyring) -> list[LedgerRow]:
    """The ledger rows of a partition's records, from its first on, as one micro-batch."""
    if not records:
        return []
    return settle_run(records, lambda _: Entries(), keyring, macs_stream(records[0].partition).encode())


def settle_topic(
    settings: Settings, keyring: Keyring, keep: Callable[[Record], bool] = lambda record: True
) -> AuditedLedger:
    """The audited ledger of what is in the topic now, in one commit: of the records that `keep` wants."""
    ledger = AuditedLedger(settings)
    found = records_in_topic(settings).values()
    ledger.commit(*(settled_rows([one for one in records if keep(one)], keyring) for records in found))
    ledger.keep()
    return ledger


def build_views(settings: Settings) -> None:
    """The view tables of the whole ledger."""
    ledger = DeltaTable(settings.table_path(LEDGER))
    changes = changes_of(ledger.to_pyarrow_dataset().to_table(columns=list(CHANGE_COLUMNS)))
    for name, table in open_tables(settings).items():
        progress = ViewProgress(changes.next_offsets, ledger.version()) if name == STREAM_ENTRIES else None
        table.apply(changes.tables[name], progress)
