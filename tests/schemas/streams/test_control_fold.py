"""The fold of control streams: the first topology counts, another one is a conflict; versions only rise."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.streams.control.control_fold import (
    CONTROL_FOLD_SWITCHED,
    CONTROL_TOPOLOGY,
    FOLD_STREAM,
    TOPOLOGY_STREAM,
    FoldSwitched,
    Topology,
)
from schemas.streams.fold import settle
from schemas.tables.fold_version import check_switch
from tests.schemas.job_records import KEYRING, document_record, make_record, said
from trunkline_agent.errors import Refused
from trunkline_agent.wire.strict_json import canonical

KEY = TOPOLOGY_STREAM.encode()


def topology(**changed: Any) -> Any:
    """A topology's record with fields changed."""
    body = {"schema_version": 1, "partitions": 4, "epoch": 1, **changed}
    return document_record(body, CONTROL_TOPOLOGY, key=KEY)


def test_the_first_topology_counts_the_same_again_is_a_duplicate_and_another_a_conflict() -> None:
    entries = Entries()
    assert said(settle(topology(), entries, KEYRING, Entries())) == ("accepted", None)
    assert said(settle(topology(), entries, KEYRING, Entries())) == ("duplicate", None)
    before = dict(entries.stored())
    assert said(settle(topology(partitions=8), entries, KEYRING, Entries())) == ("rejected", "seq_conflict")
    assert said(settle(topology(epoch=2), entries, KEYRING, Entries())) == ("rejected", "seq_conflict")
    assert entries.stored() == before


def test_the_record_that_programs_send_is_the_one_that_the_fold_reads() -> None:
    made = Topology(partitions=4, epoch=1).record(door="stack", principal="operator")
    record = make_record(made.value, made.type, key=made.key)
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("accepted", None)


def switched(from_version: int, to_version: int, **changed: Any) -> Any:
    """A switch's record with fields changed."""
    body = {"schema_version": 1, "from_version": from_version, "to_version": to_version, "offsets": {"0": 7}}
    return document_record({**body, **changed}, CONTROL_FOLD_SWITCHED, key=FOLD_STREAM.encode())


def test_the_version_of_the_fold_only_rises() -> None:
    entries = Entries()
    made = FoldSwitched(from_version=4, to_version=5, offsets={"0": 7}).record(
        door="stack", principal="operator"
    )
    assert said(settle(make_record(made.value, made.type, key=made.key), entries, KEYRING, Entries())) == (
        "accepted",
        None,
    )
    assert said(settle(switched(4, 5), entries, KEYRING, Entries())) == ("duplicate", None)
    assert said(settle(switched(4, 5, offsets={}), entries, KEYRING, Entries())) == ("rejected", "seq_conflict")
    assert said(settle(switched(6, 6), entries, KEYRING, Entries())) == ("rejected", "seq_conflict")
    assert said(settle(switched(5, "6"), entries, KEYRING, Entries())) == ("rejected", "malformed")
    assert said(settle(switched(5, 7), entries, KEYRING, Entries())) == ("accepted", None)


def test_a_program_goes_no_further_than_the_switch_to_a_newer_version() -> None:
    newer = canonical({"to_version": FOLD_VERSION + 1})
    with pytest.raises(Refused, match="start the newer program"):
        check_switch(CONTROL_FOLD_SWITCHED, "accepted", newer)
    check_switch(CONTROL_FOLD_SWITCHED, "duplicate", newer)
    check_switch(CONTROL_FOLD_SWITCHED, "accepted", canonical({"to_version": FOLD_VERSION}))


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
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", reason)
