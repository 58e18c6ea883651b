"""Agents: the newest definition counts, what is known changes nothing, and one that is gone may return."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold import memories
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.agents import agent_registry
from schemas.streams.fold import settle
from schemas.tables.ledger import ledger_row, record_of_row
from tests.schemas.hub_records import AGENT_KEY, definition, hub_told
from tests.schemas.job_records import KEYRING, START_US, said
from tests.schemas.stream_records import as_read

pytestmark = pytest.mark.requirement("HH-01")

REMOVAL = {"schema_version": 1, "agent_name": "coder"}
OTHERS = (
    {"image": "python:4"},
    {"description": ""},
    {"capabilities": []},
    {"capabilities": ["write", "read"]},
    {"hardened": False},
)


def told(entries: Entries, kind: str, body: dict[str, Any], ce_id: str, offset: int = 0) -> Settled:
    """Settle one record of the agent."""
    return hub_told(entries, f"agent.{kind}", body, ce_id=ce_id, offset=offset)


def row_of(settled: Settled) -> agent_registry.AgentRow:
    """The row of the agent."""
    (change,) = settled.changes
    assert (change.view, change.key) == ("registry_agents", "coder")
    assert isinstance(change.row, agent_registry.AgentRow)
    return change.row


def known() -> Entries:
    """The entries of an agent that was defined."""
    entries = Entries()
    assert told(entries, "defined", definition(), "first").verdict == "accepted"
    entries.take_writes()
    return entries


def test_a_definition_makes_the_agents_row() -> None:
    settled = told(Entries(), "defined", definition(), "a", offset=2)
    assert settled.status_after == "defined"
    assert row_of(settled) == agent_registry.AgentRow(
        agent_name="coder",
        status="defined",
        image="python:3",
        description="writes programs",
        capabilities=["read", "write"],
        hardened=True,
        defined_at=START_US + 2000,
        removed_at=None,
    )


@pytest.mark.parametrize("changed", OTHERS)
def test_a_definition_that_differs_in_anything_takes_the_place_of_the_one_before(
    changed: dict[str, Any],
) -> None:
    entries = known()
    row = row_of(told(entries, "defined", definition(**changed), "second", offset=5))
    assert {name: getattr(row, name) for name in changed} == changed
    assert row.defined_at == START_US + 5000
    assert told(entries, "defined", definition(**changed), "third").verdict == "duplicate"


@pytest.mark.requirement("CM-04")
@pytest.mark.parametrize("ce_id", ["first", "another"])
def test_a_definition_that_says_what_is_known_is_a_duplicate_whatever_its_id(ce_id: str) -> None:
    entries = known()
    settled = told(entries, "defined", definition(), ce_id)
    assert (*said(settled), settled.status_after, settled.changes) == ("duplicate", None, "defined", ())
    assert entries.take_writes() == {}


def test_an_agent_is_removed_once_and_may_be_defined_again() -> None:
    assert said(told(Entries(), "removed", REMOVAL, "r")) == ("rejected", "unknown_stream")
    entries = known()
    row = row_of(told(entries, "removed", REMOVAL, "r", offset=3))
    assert (row.status, row.image, row.defined_at) == ("removed", "python:3", START_US)
    assert row.removed_at == START_US + 3000
    for ce_id in ("r", "s"):
        again = told(entries, "removed", REMOVAL, ce_id)
        assert (*said(again), again.status_after) == ("duplicate", None, "removed")
    row = row_of(told(entries, "defined", definition(), "again", offset=7))
    assert (row.status, row.defined_at, row.removed_at) == ("defined", START_US + 7000, None)


@pytest.mark.requirement("CM-04")
def test_a_record_that_comes_late_does_not_bring_back_what_another_has_changed() -> None:
    entries = known()
    assert told(entries, "defined", definition(image="b"), "second").verdict == "accepted"
    assert said(told(entries, "defined", definition(), "first")) == ("duplicate", None)
    assert told(entries, "removed", REMOVAL, "r").verdict == "accepted"
    assert said(told(entries, "defined", definition(), "first")) == ("duplicate", None)
    assert said(told(entries, "defined", definition(image="c"), "first")) == ("rejected", "seq_conflict")
    assert told(entries, "defined", definition(), "third").verdict == "accepted"
    assert said(told(entries, "removed", REMOVAL, "r")) == ("duplicate", None)
    assert said(told(entries, "removed", REMOVAL, "s")) == ("accepted", None)


IDS = st.sampled_from([f"id{n}" for n in range(8)])
STEPS = st.tuples(
    IDS,
    st.one_of(
        st.builds(lambda image: ("defined", definition(image=image)), st.sampled_from("ab")),
        st.just(("removed", REMOVAL)),
    ),
)


@given(st.lists(STEPS, max_size=20), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_whatever_comes_the_row_is_the_newest_accepted_record_and_nothing_else_changes_it(
    steps: list[tuple[str, tuple[str, dict[str, Any]]]], kept: int
) -> None:
    entries, accepted = Entries(), list[tuple[str, tuple[str, dict[str, Any]]]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "REQUESTS_KEPT", kept)
        patch.setattr(memories, "REQUESTS_INSIDE", min(kept, 2))
        for offset, (ce_id, sent) in enumerate(steps):
            known_ids, before = dict(accepted[-kept:]), dict(entries.stored())
            if not accepted:
                expected = ("accepted", None) if sent[0] == "defined" else ("rejected", "unknown_stream")
            elif accepted[-1][1] == sent or known_ids.get(ce_id) == sent:
                expected = ("duplicate", None)
            else:
                expected = ("rejected", "seq_conflict") if ce_id in known_ids else ("accepted", None)
            settled = told(entries, *sent, ce_id, offset)
            assert said(settled) == expected
            assert (entries.stored() == before) == (settled.verdict != "accepted")
            if settled.verdict == "accepted":
                accepted.append((ce_id, sent))
                row = row_of(settled)
                assert row.status == settled.status_after == sent[0]
                assert (row.removed_at is None) == (sent[0] == "defined")
                assert row.image == next(s[1]["image"] for _, s in reversed(accepted) if s[0] == "defined")


def a_definition(image: str) -> agent_registry.AgentDefined:
    """The definition that a door makes of a file."""
    return agent_registry.AgentDefined(
        agent_name="coder", image=image, description="", capabilities=["read"], hardened=False
    )


def test_a_door_that_goes_back_and_forth_between_definitions_is_followed_each_time() -> None:
    """A, B, A, B, gone, A: by the row before, each change has an id of its own, and a retry the same."""
    entries, refolded, row = Entries(), Entries(), None
    for offset, image in enumerate(("a", "b", "a", "b", None, "a", None)):
        sender = {"cause": agent_registry.change_cause(row), "door": "http", "principal": "operator"}
        made = (
            agent_registry.AgentRemoved(agent_name="coder").record(**sender)
            if image is None
            else a_definition(image).record(**sender)
        )
        record = as_read(made, offset)
        settled = settle(record, entries, KEYRING, Entries())
        assert said(settled) == ("accepted", None), offset
        assert said(settle(record, entries, KEYRING, Entries())) == ("duplicate", None)
        kept = ledger_row(record, settled, KEYRING)
        assert kept.wire is None
        assert settle(record_of_row(kept, KEYRING), refolded, KEYRING, Entries()).changes == settled.changes
        row = row_of(settled)
        assert (row.status, row.image) == (
            ("removed", "b" if offset == 4 else "a") if image is None else ("defined", image)
        )
    assert refolded.stored() == entries.stored()


def test_the_id_of_a_definition_names_its_cause_its_content_and_who_says_it() -> None:
    def made(image: str = "a", **changed: Any) -> str:
        sender = {"cause": "c", "door": "http", "principal": "operator", **changed}
        return a_definition(image).record(**sender).ce_id

    removal = (
        agent_registry.AgentRemoved(agent_name="coder")
        .record(cause="c", door="http", principal="operator")
        .ce_id
    )
    others = [made("b"), made(cause="d"), made(door="cli"), made(principal="bo"), removal]
    assert made() == made()
    assert made() not in others
    assert len(set(others)) == len(others)


@pytest.mark.requirement("HH-11")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("defined", definition(image="")),
        ("defined", definition(image="x" * 256)),
        ("defined", definition(image="bell \a")),
        ("defined", definition(description="x" * 4001)),
        ("defined", definition(description=None)),
        ("defined", definition(capabilities=["read", "read"])),
        ("defined", definition(capabilities=[f"c{n}" for n in range(65)])),
        ("defined", definition(capabilities=["a/b"])),
        ("defined", definition(capabilities={"read": True})),
        ("defined", definition(hardened=1)),
        ("defined", definition(agent_name="bo")),
        ("defined", definition(more=1)),
        ("defined", REMOVAL),
        ("removed", definition()),
        ("painted", REMOVAL),
    ],
)
def test_a_body_that_its_model_refuses_is_malformed(kind: str, body: dict[str, Any]) -> None:
    for entries in (Entries(), known()):
        settled = hub_told(entries, f"agent.{kind}", body, key=AGENT_KEY)
        assert said(settled) == ("rejected", "malformed")


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", ["", "../x", "a/b", "#", "x" * 129])
def test_no_record_is_made_for_an_agent_that_is_no_name(name: str) -> None:
    with pytest.raises(ValidationError):
        agent_registry.AgentRemoved(agent_name=name).record(cause="", door="http", principal="operator")
