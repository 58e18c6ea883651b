"""Principals: added once, revoked for ever; of a token only its hash is anywhere."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.fold import settle
from schemas.streams.principal import principals
from schemas.tables.ledger import ledger_row
from tests.schemas.job_records import KEYRING, SENDER, START_US, document_record, said
from tests.schemas.stream_records import PRINCIPAL_KEY, TOKEN_SHA256, accepted_and_refolded, addition, as_read

REVOCATION = {"schema_version": 1, "principal": "ann"}
ADDITIONS = (addition(), addition(role="viewer"), addition(token_sha256="f" * 64))


def told(entries: Entries, kind: str, body: dict[str, Any], offset: int = 0) -> Settled:
    """Settle a record of type `principal.<kind>`."""
    record = document_record(body, f"principal.{kind}", key=PRINCIPAL_KEY, offset=offset)
    return settle(record, entries, KEYRING, Entries())


STEPS = st.tuples(st.just("added"), st.sampled_from(ADDITIONS)) | st.tuples(
    st.just("revoked"), st.just(REVOCATION)
)


@given(st.lists(STEPS, max_size=10))
@settings(max_examples=100, deadline=None)
def test_a_principal_is_added_once_and_revoked_once(steps: list[tuple[str, dict[str, Any]]]) -> None:
    entries = Entries()
    first: dict[str, Any] | None = None
    status, times = None, {"added_at": None, "revoked_at": None}
    for offset, (kind, body) in enumerate(steps):
        settled, time_us = told(entries, kind, body, offset), START_US + offset * 1000
        if kind == "added" and first is not None:
            expected = ("duplicate", None) if body == first else ("rejected", "seq_conflict")
        elif kind == "revoked" and first is None:
            expected = ("rejected", "unknown_stream")
        elif kind == "revoked" and status == "revoked":
            expected = ("duplicate", None)
        else:
            expected = ("accepted", None)
            first = first or body
            status = "active" if kind == "added" else "revoked"
            times["added_at" if kind == "added" else "revoked_at"] = time_us
            row = principals.PrincipalRow("ann", first["role"], status, first["token_sha256"], SENDER, **times)  # type: ignore[arg-type]
            assert [(c.view, c.key, c.row) for c in settled.changes] == [("registry_principals", "ann", row)]
        assert (said(settled), settled.status_after) == (expected, status)
        assert (settled.changes == ()) == (settled.verdict != "accepted")


@pytest.mark.requirement("CM-05")
def test_a_token_is_in_neither_record_nor_row_nor_entry() -> None:
    token = principals.new_token()
    assert len(token) >= 43
    assert token != principals.new_token()
    record = as_read(
        principals.PrincipalAddition(
            principal="ann", role="worker", token_sha256=principals.token_hash(token)
        ).record(door="http", principal="operator")
    )
    entries = Entries()
    settled = settle(record, entries, KEYRING, Entries())
    row = ledger_row(record, settled, KEYRING, (), dict(entries.stored()))
    assert token not in repr((record, settled, row, entries.stored()))
    (change,) = settled.changes
    assert isinstance(change.row, principals.PrincipalRow)
    assert change.row.token_sha256 == principals.token_hash(token) == hashlib.sha256(token.encode()).hexdigest()


def test_the_hash_of_a_token_that_is_no_text_is_still_a_hash() -> None:
    assert len(principals.token_hash("\udcff")) == 64


@pytest.mark.parametrize("role", principals.ROLES)
def test_the_records_that_the_operator_makes_are_accepted_and_refolded(role: str) -> None:
    made = (
        principals.PrincipalAddition(
            principal="ann", role=role, token_sha256=principals.token_hash("t")
        ).record(door="http", principal="operator"),
        principals.PrincipalRevocation(principal="ann").record(door="http", principal="operator"),
    )
    rows, entries = accepted_and_refolded(as_read(outgoing, offset) for offset, outgoing in enumerate(made))
    assert {(row.door, row.principal, row.wire) for row in rows} == {("http", "operator", None)}
    again = [settle(as_read(outgoing), entries, KEYRING, Entries()) for outgoing in made]
    assert [(s.verdict, s.status_after) for s in again] == [("duplicate", "revoked")] * 2


@pytest.mark.parametrize("name", sorted(principals.RESERVED_PRINCIPALS))
def test_nobody_gets_the_name_of_one_that_the_programs_use_themselves(name: str) -> None:
    with pytest.raises(ValidationError):
        principals.PrincipalAddition(
            principal=name, role="viewer", token_sha256=principals.token_hash("t")
        ).record(door="http", principal="operator")
    record = document_record(addition(principal=name), "principal.added", key=f"principal/{name}".encode())
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "malformed")


@pytest.mark.parametrize(
    "body",
    [
        addition(role="root"),
        addition(role=None),
        addition(token_sha256=TOKEN_SHA256.upper()),
        addition(token_sha256=TOKEN_SHA256 + "\n"),
        addition(token_sha256=TOKEN_SHA256[1:]),
        addition(principal="bo"),
        addition(token="t"),
        REVOCATION,
    ],
)
def test_an_addition_that_its_model_refuses_is_malformed(body: dict[str, Any]) -> None:
    assert said(told(Entries(), "added", body)) == ("rejected", "malformed")


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", ["", "../x", "a/b", "#", "x" * 129])
def test_no_record_is_made_for_a_principal_that_is_no_name(name: str) -> None:
    with pytest.raises(ValidationError):
        principals.PrincipalAddition(
            principal=name, role="viewer", token_sha256=principals.token_hash("t")
        ).record(door="http", principal="operator")
    with pytest.raises(ValidationError):
        principals.PrincipalRevocation(principal=name).record(door="http", principal="operator")
