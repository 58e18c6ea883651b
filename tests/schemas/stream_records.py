"""Records of every kind of stream as tests make them: one good body for each record type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from schemas.fold.entries import Entries
from schemas.keys.record_macs import GATEWAY, mac_of
from schemas.streams.control.record_macs import MAC_MODELS
from schemas.streams.fold import settle
from schemas.tables.ledger import LedgerRow, ledger_row, record_of_row
from schemas.wire.record import MAC_HEADERS, OutgoingRecord, Record, record_mac_input
from tests.schemas import job_records
from tests.schemas.hub_records import HUB_FIRST, HUB_GOOD

JOB_KEY: Final = b"job/" + job_records.JOB_ID.encode()
SESSION_KEY: Final = b"session/s1"
MAILBOX_KEY: Final = b"mailbox/default/bo"
PRINCIPAL_KEY: Final = b"principal/ann"
REFUSED_KEY: Final = b"refused/http"
CONTROL_KEY: Final = b"control/topology"
TOKEN_SHA256: Final = "0123456789abcdef" * 4


def message(message_id: str = "m1", **changed: Any) -> dict[str, Any]:
    """The body of a posted message, with fields changed."""
    body = {
        "schema_version": 1,
        "message_id": message_id,
        "realm": "default",
        "from": "ann",
        "to": "bo",
        "kind": "ask",
        "body": '{"stars":3}',
    }
    return {**body, **changed}


def creation(request_id: str = "q1", **changed: Any) -> dict[str, Any]:
    """The body of a session's creation, with fields changed."""
    return {"schema_version": 1, "session": "s1", "request_id": request_id, **changed}


def assignment(job_id: str = job_records.JOB_ID, **changed: Any) -> dict[str, Any]:
    """The body that says which job a session has picked."""
    return {"schema_version": 1, "session": "s1", "job_id": job_id, **changed}


def addition(**changed: Any) -> dict[str, Any]:
    """The body of a principal's addition, with fields changed."""
    body = {"schema_version": 1, "principal": "ann", "role": "delegator", "token_sha256": TOKEN_SHA256}
    return {**body, **changed}


def of_mailbox(**fields: Any) -> dict[str, Any]:
    """The body of a request about what lies in the mailbox of `message`."""
    posted = message()
    return {"schema_version": 1, "realm": posted.get("realm", "default"), "to": posted["to"], **fields}


def refusal(**changed: Any) -> dict[str, Any]:
    """The body of a refusal, with fields changed."""
    body = {
        "schema_version": 1,
        "request_id": "q1",
        "reason": "unauthorized",
        "why": "no such token",
        "principal": "anonymous",
        "route": "/api/hub/jobs",
        "policy_version": 1,
        "suppressed": 0,
    }
    return {**body, **changed}


# Record type -> the key of its stream and a good body.
GOOD: Final[dict[str, tuple[bytes, dict[str, Any]]]] = {
    "job.registered": (JOB_KEY, job_records.registration()),
    "job.picked": (JOB_KEY, job_records.pick()),
    "job.event": (JOB_KEY, job_records.signed()),
    "job.cancelled": (JOB_KEY, job_records.cancellation()),
    "job.secret_rotated": (JOB_KEY, job_records.rotation()),
    "session.created": (SESSION_KEY, creation()),
    "session.stopped": (SESSION_KEY, creation("q2", mode="stop")),
    "session.resumed": (SESSION_KEY, creation("q3")),
    "session.job_assigned": (SESSION_KEY, assignment()),
    "session.job_ended": (SESSION_KEY, assignment(outcome="completed")),
    "message.posted": (MAILBOX_KEY, message()),
    "message.claimed": (MAILBOX_KEY, of_mailbox(request_id="q1")),
    "message.leased": (MAILBOX_KEY, of_mailbox(request_id="q2", lease_ms=1000)),
    "message.extended": (MAILBOX_KEY, of_mailbox(message_id="m1", request_id="q2", lease_ms=1000)),
    "message.acked": (MAILBOX_KEY, of_mailbox(message_id="m1", request_id="q2")),
    "message.handled": (MAILBOX_KEY, of_mailbox(messages=[{"message_id": "m1", "request_id": "q2"}])),
    "message.nacked": (MAILBOX_KEY, of_mailbox(message_id="m1", request_id="q2", reason="busy")),
    "message.reclaimed": (MAILBOX_KEY, of_mailbox(message_id="m1", request_id="q2")),
    "message.read": (MAILBOX_KEY, of_mailbox(message_id="m1")),
    "message.expired": (MAILBOX_KEY, of_mailbox(message_id="m1")),
    "message.due": (MAILBOX_KEY, of_mailbox(message_id="m1")),
    "mailbox.cleared": (MAILBOX_KEY, of_mailbox(request_id="q3")),
    "mailbox.closed": (MAILBOX_KEY, of_mailbox(request_id="q4")),
    "mailbox.opened": (MAILBOX_KEY, of_mailbox(request_id="q5")),
    "mailbox.limited": (MAILBOX_KEY, of_mailbox(request_id="q6", pending_most=9)),
    "principal.added": (PRINCIPAL_KEY, addition()),
    "principal.revoked": (PRINCIPAL_KEY, {"schema_version": 1, "principal": "ann"}),
    "request.refused": (REFUSED_KEY, refusal()),
    "control.topology": (CONTROL_KEY, {"schema_version": 1, "partitions": 4, "epoch": 1}),
    "control.fold_switched": (
        b"control/fold",
        {"schema_version": 1, "from_version": 4, "to_version": 5, "offsets": {"0": 7}},
    ),
    "control.macs_required": (b"control/macs-1", {"schema_version": 1, "partition": 1, "partitions": 4}),
    "control.limited": (
        b"control/limits",
        {"schema_version": 1, "scope": "role", "name": "worker", "request_id": "q1", "pending_most": 9},
    ),
    "control.mac_key_ended": (b"control/macs-1", {"schema_version": 1, "partition": 1, "key_id": "k0"}),
    **HUB_GOOD,
}
_FIRST: Final = (
    "job.registered",
    "session.created",
    "message.posted",
    "principal.added",
    "control.topology",
    "control.fold_switched",
    "control.macs_required",
    "control.limited",
    *HUB_FIRST,
)


def good_record(record_type: str, **changed: Any) -> Record:
    """A record of this type that is right in itself."""
    key, body = GOOD[record_type]
    record = job_records.document_record(body, record_type, key=key, **changed)
    return with_mac(record) if record_type in MAC_MODELS else record


def with_mac(record: Record, signer: str = GATEWAY) -> Record:
    """The record with the MAC that the gateway, or another signer, would have made."""
    mac_key = job_records.KEYRING.mac_key(signer)
    made = (mac_key.name.encode(), mac_of(mac_key, record_mac_input(record)).encode())
    names = (*record.header_names, *MAC_HEADERS[-2:])
    return msgspec.structs.replace(record, header_names=names, header_values=(*record.header_values, *made))


def known_stream(key: bytes | None) -> Entries:
    """The entries of a stream of GOOD after its first record; empty for any other key."""
    entries = Entries()
    for record_type in _FIRST:
        if GOOD[record_type][0] == key:
            assert (
                settle(good_record(record_type, ce_id="first"), entries, job_records.KEYRING, Entries()).verdict
                == "accepted"
            )
    entries.take_writes()
    return entries


def accepted_and_refolded(records: Iterable[Record]) -> tuple[list[LedgerRow], Entries]:
    """Settle records of one stream: each must be accepted, and the ledger rows must fold to the same state.

    Returns the rows and the entries.
    """
    entries, refolded, rows = Entries(), Entries(), list[LedgerRow]()
    for record in records:
        settled = settle(record, entries, job_records.KEYRING, Entries())
        assert (settled.verdict, settled.reason) == ("accepted", None), record
        rows.append(ledger_row(record, settled, job_records.KEYRING))
        again = settle(record_of_row(rows[-1], job_records.KEYRING), refolded, job_records.KEYRING, Entries())
        assert again.changes == settled.changes
    assert refolded.stored() == entries.stored()
    return rows, entries


def as_read(
    made: OutgoingRecord, offset: int = 0, logged_at_us: int | None = None, partition: int = 1
) -> Record:
    """Return a door's record as a runner reads it back, a millisecond after the one before it by default."""
    names, values = zip(*made.headers(), strict=True)
    moment = job_records.START_US + offset * 1000 if logged_at_us is None else logged_at_us
    return Record(job_records.TOPIC, partition, offset, moment, made.key, made.value, names, values)
