"""The fold of control streams: the first topology counts, and another one is a conflict."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.control_fold import TOPOLOGY_STREAM, topology_record
from schemas.entries import Entries
from schemas.fold import settle
from schemas.record import CONTROL_TOPOLOGY
from tests.schemas.job_records import KEYRING, document_record, make_record, said

KEY = TOPOLOGY_STREAM.encode()


def topology(**changed: Any) -> Any:
    """A topology's record with fields changed."""
    body = {"schema_version": 1, "partitions": 4, "epoch": 1, **changed}
    return document_record(body, CONTROL_TOPOLOGY, key=KEY)


def test_the_first_topology_counts_the_same_again_is_a_duplicate_and_another_a_conflict() -> None:
    entries = Entries()
    assert said(settle(topology(), entries, KEYRING)) == ("accepted", None)
    assert said(settle(topology(), entries, KEYRING)) == ("duplicate", None)
    before = dict(entries.stored())
    assert said(settle(topology(partitions=8), entries, KEYRING)) == ("rejected", "seq_conflict")
    assert said(settle(topology(epoch=2), entries, KEYRING)) == ("rejected", "seq_conflict")
    assert entries.stored() == before


def test_the_record_that_programs_send_is_the_one_that_the_fold_reads() -> None:
    made = topology_record(4, 1)
    record = make_record(made.value, made.type, key=made.key)
    assert said(settle(record, Entries(), KEYRING)) == ("accepted", None)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (topology(partitions="4"), "malformed"),
        (topology(partitions=True), "malformed"),
        (topology(epoch=None), "malformed"),
        (topology(more=1), "malformed"),
        (topology(schema_version=2), "schema_version"),
        (document_record({"schema_version": 1}, CONTROL_TOPOLOGY, key=KEY), "malformed"),
        (document_record({"schema_version": 1}, "control.painted", key=KEY), "unknown_stream"),
        (document_record({"schema_version": 1}, CONTROL_TOPOLOGY, key=b"control/weather"), "unknown_stream"),
    ],
)
def test_what_is_no_topology_is_refused(record: Any, reason: str) -> None:
    assert said(settle(record, Entries(), KEYRING)) == ("rejected", reason)
