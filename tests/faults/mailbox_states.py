"""The ledger's mailboxes compared with the model of a mailbox, which shares no code with the fold."""

from __future__ import annotations

from typing import Any, Final

import orjson
import pyarrow as pa

from schemas.keys.sealing import Keyring
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from schemas.tables.ledger import COLUMNS, LedgerRow, record_of_row
from schemas.wire.record import Record
from tests.faults.backbone_states import State, micros
from tests.schemas.streams.mailbox_model import MailboxModel
from trunkline_agent.wire.verdicts import (
    AFTER_TERMINAL,
    ILLEGAL_TRANSITION,
    SEQ_CONFLICT,
    UNKNOWN_STREAM,
)

# The model takes bodies that are right in themselves. Any other reason is about a body that is not.
_MODELLED: Final = frozenset({None, SEQ_CONFLICT, UNKNOWN_STREAM, AFTER_TERMINAL, ILLEGAL_TRANSITION})
Told = tuple[str, str | None, str | None]
"""Verdict, reason and the status after the record."""


class ModelledMailboxes:
    """A model for each mailbox of a log. `reached` has type, answer and status of each record and row."""

    def __init__(self) -> None:
        self.models: dict[str, MailboxModel] = {}
        self.reached: set[tuple[str, str, str | None]] = set()

    def differs(self, record: Record, told: Told) -> str | None:
        """Settle a record by the model. Describe the difference to what the fold has told, if there is one."""
        stream = (record.key or b"").decode("ascii", "replace")
        if not stream.startswith("mailbox/") or told[1] not in _MODELLED:
            return None
        headers = dict(zip(record.header_names, record.header_values, strict=True))
        ce_id, source, kind = ((headers[name] or b"").decode() for name in ("ce_id", "ce_source", "ce_type"))
        _, realm, recipient = stream.split("/")
        model = self.models.setdefault(stream, MailboxModel(realm, recipient))
        kind = kind.partition(".")[2]
        said = model.settle(kind, ce_id, source, orjson.loads(record.value or b""), record.logged_at_us)
        answer = said.reason or said.verdict
        self.reached |= {(kind, answer, said.status), *((kind, answer, row["status"]) for row in said.rows)}
        if (said.verdict, said.reason, said.status) == told:
            return None
        return f"{stream} {kind} {ce_id} at {record.partition}/{record.offset}: {told}, the model {said[:3]}"

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the row of each message by its key."""
        return {
            f"{model.realm}/{model.recipient}/{message['message_id']}": message
            for model in self.models.values()
            for message in model.messages
        }


def differences_to_the_model(ledger: pa.Table, tables: State, keyring: Keyring, limit: int = 10) -> list[str]:
    """Describe where the ledger's verdicts on mailboxes, or their rows in the tables, are not the model's."""
    mailboxes, found = ModelledMailboxes(), list[str]()
    for columns in ledger.to_pylist():
        row = LedgerRow(**{name: micros(columns[name]) for name in COLUMNS})
        if row.stream_kind == "mailbox":
            record = record_of_row(row, keyring)
            difference = mailboxes.differs(record, (row.verdict, row.reason, row.status_after))
            found += [] if difference is None else [difference]
    shown = {key: row for key, (_, row) in tables["rows"][MAILBOX_VIEW].items()}
    rows = mailboxes.rows()
    found += [
        f"{key}: {shown.get(key)}, the model {rows.get(key)}"
        for key in sorted(shown.keys() | rows.keys())
        if shown.get(key) != rows.get(key)
    ]
    return found[:limit]
