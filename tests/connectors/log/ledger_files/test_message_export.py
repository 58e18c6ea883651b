"""The Parquet export of messages, opened with DuckDB, against the view that it is made of."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from connectors.log.ledger_files import message_export_reader
from connectors.log.ledger_files.message_export_reader import (
    ExportStopped,
    MessageExporter,
    export_file,
    export_messages,
)
from schemas.settings.settings import AgentMcpSettings, Settings
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim, MailboxClearing, MessageReading
from schemas.streams.mailboxes.message import (
    MAILBOX_VIEW,
    MESSAGE_BODIES,
    PRIORITIES,
    Message,
    MessageBodyRow,
    MessageRow,
)
from schemas.tables.delta_files import table_storage
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.connectors.folded_log import FoldedLog
from tests.connectors.ledger_tables import KEYRING, settings_below
from tests.s3_server import ObjectStore
from tests.schemas.stream_records import as_read
from trunkline_agent.errors import NotFound, TrunklineError, UsageError

pytestmark = pytest.mark.requirement("AM-07")

FIRST_US = 1_790_000_000_000_000
COLUMNS = [
    ("id", "VARCHAR"),
    ("from_agent", "VARCHAR"),
    ("to_agent", "VARCHAR"),
    ("content", "VARCHAR"),
    ("timestamp", "BIGINT"),
    ("read", "BOOLEAN"),
    ("priority", "VARCHAR"),
    ("created_at", "TIMESTAMP WITH TIME ZONE"),
]
BODIES = ("plain", '{"a": 1}', "ein Gruß 😀", "", "two\nlines", "\u202e\x00 quote ' \"", "long " * 5000)
SENT = (None, "2026-11-21T10:00:00Z", "2026-11-21T10:00:00.123456789Z", "yesterday", "2026-13-40T99:00:00Z", "")


def message(number: int, to: str, **fields: Any) -> OutgoingRecord:
    """The posting of one message."""
    said = {
        "message_id": f"m-{number}",
        "from": f"sender-{number % 5}",
        "to": to,
        "kind": "message",
        "priority": PRIORITIES[number % 3],
        "body": BODIES[number % len(BODIES)],
        "sent_at": SENT[number % len(SENT)],
        **fields,
    }
    return Message.model_validate(said).record(door="mcp", principal="ann")


class Tables:
    """View tables made by the fold alone."""

    def __init__(self, folder: Path) -> None:
        self.settings = settings_below(folder)
        self.folded = FoldedLog(KEYRING)
        self._offset = 0

    def add(self, *records: OutgoingRecord) -> None:
        """Settle records, a second and some apart."""
        for one in records:
            moment = FIRST_US + self._offset * 1_234_000
            self.folded.add(as_read(one, self._offset, moment, partition=0))
            self._offset += 1

    def write(self) -> Settings:
        """Write the tables."""
        self.folded.write_rows(self.settings)
        return self.settings

    def expected(self) -> list[tuple[Any, ...]]:
        """Derive the expected content of the export from the view's rows."""
        found = []
        for key, (_, _, row) in self.folded.rows[MAILBOX_VIEW].items():
            body = self.folded.rows[MESSAGE_BODIES][key][2]
            assert isinstance(row, MessageRow)
            assert isinstance(body, MessageBodyRow)
            created = None
            if row.sent_at is not None and row.sent_at.startswith("2026-11-21"):
                micros = 123456 if "." in row.sent_at else 0
                created = datetime(2026, 11, 21, 10, 0, 0, micros, UTC)
            found.append(
                (
                    row.message_id,
                    row.sender,
                    row.recipient,
                    body.body,
                    row.posted_at // 1000,
                    row.status in ("read", "claimed"),
                    row.priority,
                    created,
                )
            )
        return sorted(found, key=lambda one: one[:3])


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Tables with messages of every kind."""
    made = Tables(tmp_path / "data")
    made.add(*(message(number, f"agent-{number % 4}") for number in range(60)))
    # The same id in another mailbox, and a mailbox of another realm.
    made.add(message(1, "agent-9"), message(70, "agent-1", realm="session-1", body="elsewhere"))
    made.add(message(71, "agent-1", expires_at="2026-09-21T15:00:00Z"))
    who = {"door": "mcp", "principal": "agent-1"}
    made.add(
        MessageReading(to="agent-1", message_id="m-5").record(**who),
        MessageReading(to="agent-1", message_id="m-9").record(**who),
    )
    made.add(MailboxClaim(to="agent-2", request_id="claim-1", limit=4).record(**who))
    made.add(MailboxClearing(to="agent-3", request_id="clear-1").record(door="http", principal="operator"))
    return made


def exported(file: Path) -> list[tuple[Any, ...]]:
    """Return the rows that DuckDB reads from the file, times in UTC."""
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        # As a number: a moment would come as an object of a library that we do not have.
        found = db.execute(
            "SELECT * EXCLUDE created_at, epoch_us(created_at) FROM read_parquet(?) "
            "ORDER BY id, from_agent, to_agent",
            [str(file)],
        ).fetchall()
    start = datetime(1970, 1, 1, tzinfo=UTC)
    return [(*row[:-1], None if row[-1] is None else start + timedelta(microseconds=row[-1])) for row in found]


def test_duckdb_finds_the_columns_the_types_and_the_messages_of_the_view(
    tables: Tables, tmp_path: Path
) -> None:
    made = export_messages(tables.write(), tmp_path / "out" / "messages.parquet")
    assert (made.messages, made.size_bytes) == (63, made.file.stat().st_size)
    with duckdb.connect() as db:
        columns = db.execute("DESCRIBE SELECT * FROM read_parquet(?)", [str(made.file)]).fetchall()
    assert [(name, kind) for name, kind, *_ in columns] == COLUMNS
    assert exported(made.file) == tables.expected()
    statuses = {row.status for _, _, row in tables.folded.rows[MAILBOX_VIEW].values()}
    assert {"unread", "read", "claimed", "cleared"} <= statuses
    assert {row[5] for row in exported(made.file)} == {True, False}


def test_in_the_parquet_schema_all_columns_but_the_last_are_required(tables: Tables, tmp_path: Path) -> None:
    made = export_messages(tables.write(), tmp_path / "messages.parquet")
    schema = pq.ParquetFile(made.file).schema
    levels = {schema.column(number).name: schema.column(number).max_definition_level for number in range(8)}
    assert levels == {name: int(name == "created_at") for name, _ in COLUMNS}


def test_it_is_the_same_when_it_is_read_in_many_small_groups(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tables.write()
    for name, value in (("_MESSAGES_AT_ONCE", 7), ("_ROWS_DECODED", 3), ("_ROWS_JOINED", 5)):
        monkeypatch.setattr(message_export_reader, name, value)
    made = export_messages(settings, tmp_path / "messages.parquet")
    assert exported(made.file) == tables.expected()


@pytest.mark.long
def test_an_older_export_is_replaced_as_a_whole_and_anything_else_is_left_alone(
    tables: Tables, tmp_path: Path
) -> None:
    settings, file = tables.write(), tmp_path / "messages.parquet"
    export_messages(settings, file)
    with pytest.raises(ExportStopped):
        export_messages(settings, file, lambda: True)
    assert len(exported(file)) == 63
    tables.add(message(90, "agent-0"))
    tables.write()
    assert export_messages(settings, file).messages == 64
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["messages.parquet"]
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(UsageError, match="no Parquet file"):
        export_messages(settings, notes)
    assert notes.read_text() == "mine"
    with pytest.raises(UsageError, match="cannot write"):
        export_messages(settings, notes / "messages.parquet")


def test_without_tables_there_is_nothing_to_export_and_a_lost_body_is_told(tmp_path: Path) -> None:
    tables = Tables(tmp_path / "data")
    with pytest.raises(NotFound):
        export_messages(tables.settings, tmp_path / "messages.parquet")
    tables.add(message(1, "agent-1"), message(2, "agent-1"))
    del tables.folded.rows[MESSAGE_BODIES]["default/agent-1/m-2"]
    tables.write()
    with pytest.raises(TrunklineError, match="1 messages have no body"):
        export_messages(tables.settings, tmp_path / "messages.parquet")
    assert not [path for path in tmp_path.iterdir() if "parquet" in path.name]


def test_the_companion_writes_when_the_file_is_too_old_and_only_then(tables: Tables) -> None:
    settings = tables.write().model_copy(update={"agent_mcp": AgentMcpSettings(export_interval_ms=100, port=0)})
    file = export_file(settings)
    exporter = MessageExporter(settings)
    exporter.open()
    wait_until(file.exists, what="the first export")
    first = file.stat().st_ino
    wait_until(lambda: file.stat().st_ino != first, what="the next one")
    exporter.close()
    assert exported(file) == tables.expected()
    hourly = MessageExporter(settings.model_copy(update={"agent_mcp": AgentMcpSettings()}))
    assert not hourly.is_due()
    for age_s in (3601, -60):
        moment = file.stat().st_mtime - age_s
        os.utime(file, (moment, moment))
        assert hourly.is_due()
        os.utime(file)


@pytest.mark.requirement("DP-19")
def test_it_is_an_object_if_the_settings_name_one(tables: Tables, tmp_path: Path, s3: ObjectStore) -> None:
    there = f"s3://{s3.bucket}/export"
    named = AgentMcpSettings(export_file=f"{there}/messages.parquet", port=0)
    settings = tables.write().model_copy(update={"agent_mcp": named})
    exporter = MessageExporter(settings)
    assert exporter.is_due()
    made = export_messages(settings, export_file(settings))
    assert (made.file, made.messages) == (f"{there}/messages.parquet", 63)
    storage = table_storage(there)
    with storage.open_input_stream("messages.parquet") as stream:
        (tmp_path / "copy.parquet").write_bytes(stream.read())
    assert (tmp_path / "copy.parquet").stat().st_size == made.size_bytes
    assert exported(tmp_path / "copy.parquet") == tables.expected()
    assert not list((settings.data_path / "export").iterdir()), "nothing is left on this machine"
    hour_s = settings.agent_mcp.export_interval_ms / 1000
    assert not exporter.is_due() and MessageExporter(settings, lambda: time.time() + hour_s).is_due()
    with storage.open_output_stream("notes.txt") as stream:
        stream.write(b"mine")
    with pytest.raises(UsageError, match="no Parquet file"):
        export_messages(settings, f"{there}/notes.txt")
    with pytest.raises(TrunklineError, match=r"written to s3://nowhere/x: .*NoSuchBucket") as caught:
        export_messages(settings, "s3://nowhere/x")
    assert "\n" not in str(caught.value)
