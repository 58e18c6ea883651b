"""A door's own refusals: records under `refused/<door>`, with the door's reason and words."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.streams.fold import settle
from schemas.streams.refused.refusal import ANONYMOUS, POLICY_VERSION, Refusal, RefusalReason
from schemas.tables.ledger import ledger_row, record_of_row
from tests.schemas.job_records import KEYRING, document_record, said
from tests.schemas.stream_records import REFUSED_KEY, as_read, refusal
from trunkline_agent.wire.verdicts import DOOR_REASONS, REASONS


@given(st.lists(st.tuples(st.sampled_from(DOOR_REASONS), st.text("ab c", max_size=9)), max_size=6))
@settings(max_examples=50, deadline=None)
def test_every_refusal_is_a_row_with_the_reason_of_its_door_and_leaves_nothing_behind(
    sent: list[tuple[str, str]],
) -> None:
    entries = Entries()
    for reason, why in sent:
        record = document_record(refusal(reason=reason, why=why), "request.refused", key=REFUSED_KEY)
        settled = settle(record, entries, KEYRING, Entries())
        assert (*said(settled), settled.why) == ("rejected", reason, why)
        assert (settled.stream_kind, settled.stream_id, settled.changes) == ("refused", "http", ())
    assert entries.stored() == {}


def test_the_record_that_a_door_makes_is_settled_and_refolded() -> None:
    made = Refusal(
        request_id="q1", reason="policy", why="not its role", principal="ann", route="/x", suppressed=7
    )
    record = as_read(made.record(door="http", principal=made.principal), 2)
    assert record.key == b"refused/http"
    settled = settle(record, Entries(), KEYRING, Entries())
    row = ledger_row(record, settled, KEYRING)
    assert (row.reason, row.why, row.principal, row.wire) == ("policy", "not its role", "ann", None)
    assert settle(record_of_row(row, KEYRING), Entries(), KEYRING, Entries()).reason == "policy"


def test_a_refusal_says_by_which_rules_it_was_decided_and_whom_it_met() -> None:
    made = Refusal(request_id="q1", reason="unauthorized", why="no token", route="/x")
    assert (made.policy_version, made.principal, made.suppressed) == (POLICY_VERSION, ANONYMOUS, 0)


def test_two_refusals_of_the_same_kind_are_told_apart_by_their_request() -> None:
    ids = {
        Refusal(request_id=q, reason="policy", why="w", route="/x")
        .record(door="http", principal=ANONYMOUS)
        .ce_id
        for q in ("a", "b")
    }
    assert len(ids) == 2


@pytest.mark.parametrize("reason", sorted(set(REASONS) - set(get_args(RefusalReason))))
def test_a_door_cannot_decide_what_is_the_folds_to_decide(reason: str) -> None:
    record = document_record(refusal(reason=reason), "request.refused", key=REFUSED_KEY)
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "malformed")
    with pytest.raises(ValidationError):
        Refusal.model_validate(refusal(reason=reason))


@pytest.mark.parametrize(
    "changed",
    [
        {"why": "x" * 501},
        {"why": "bell \u0007"},
        {"route": "x" * 201},
        {"route": None},
        {"principal": "a/b"},
        {"suppressed": -1},
        {"suppressed": True},
        {"policy_version": 0},
        {"path": "/etc"},
    ],
)
def test_a_field_that_is_wrong_makes_a_refusal_malformed(changed: dict[str, Any]) -> None:
    record = document_record(refusal(**changed), "request.refused", key=REFUSED_KEY)
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "malformed")


def test_a_refusal_belongs_under_no_other_kind_of_stream() -> None:
    for key in (b"session/s1", b"principal/ann", b"mailbox/default/bo", b"job/ab12cd34"):
        record = document_record(refusal(), "request.refused", key=key)
        assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "malformed")
    record = document_record(refusal(), "request.refused", key=b"control/topology")
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "unknown_stream")
