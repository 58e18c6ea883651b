"""Containers: one step forward at a time, by the launcher that began, or away by anybody; each state once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.container import containers
from tests.schemas.hub_records import CONTAINER_KEY, container_change, hub_told
from tests.schemas.job_records import START_US, said
from tests.schemas.stream_records import accepted_and_refolded, as_read

pytestmark = pytest.mark.requirement("HH-05")

# HH-05, in its order.
ORDER = ("provisioning", "configuring", "starting", "running", "monitoring", "recycling", "recycled")
OF_THE_LAUNCHER = ("configuring", "starting", "running")


def told(entries: Entries, state: str, offset: int = 0, **changed: Any) -> Settled:
    """Settle the container's change to `state`."""
    return hub_told(entries, "container.changed", container_change(state, **changed), offset=offset)


def in_state(state: str) -> Entries:
    """The entries of a container that went through every state up to `state`."""
    entries = Entries()
    for reached in ORDER[: ORDER.index(state) + 1]:
        assert told(entries, reached).verdict == "accepted"
    entries.take_writes()
    return entries


def row_of(settled: Settled) -> containers.ContainerRow:
    """The row of the container."""
    (change,) = settled.changes
    assert (change.view, change.key) == ("registry_containers", "c1")
    assert isinstance(change.row, containers.ContainerRow)
    return change.row


def test_the_life_cycle_is_the_one_of_the_spec() -> None:
    assert containers.CONTAINER_STATES == ORDER
    forward = {(ORDER[n], ORDER[n + 1]) for n in range(6)}
    away = {(state, "recycling") for state in ORDER[:5]}
    assert {
        (state, wanted) for state, ways in containers.CONTAINER_TRANSITIONS.items() for wanted in ways
    } == forward | away


def test_a_launcher_that_provisions_makes_the_containers_row() -> None:
    settled = told(Entries(), "provisioning", 2, host="h1")
    assert settled.status_after == "provisioning"
    assert row_of(settled) == containers.ContainerRow(
        container="c1",
        state="provisioning",
        task_id="t1",
        agent_name="coder",
        backend="process",
        host="h1",
        handle=None,
        port=None,
        error=None,
        created_at=START_US + 2000,
        changed_at=START_US + 2000,
    )


@pytest.mark.parametrize("state", ORDER[1:])
def test_a_container_that_nobody_provisioned_is_an_unknown_stream(state: str) -> None:
    assert said(told(Entries(), state)) == ("rejected", "unknown_stream")


@pytest.mark.parametrize("wanted", ORDER)
@pytest.mark.parametrize("state", ORDER)
def test_exactly_the_transitions_of_the_life_cycle_are_possible(state: str, wanted: str) -> None:
    entries = in_state(state)
    settled = told(entries, wanted, error="of another content")
    if wanted in containers.CONTAINER_TRANSITIONS[state]:
        assert (*said(settled), settled.status_after) == ("accepted", None, wanted)
        assert row_of(settled).state == wanted
        return
    reason = "after_terminal" if state == "recycled" else "illegal_transition"
    assert (*said(settled), settled.status_after) == ("rejected", reason, state)
    assert (settled.changes, entries.take_writes()) == ((), {})


@pytest.mark.requirement("CM-04")
@pytest.mark.parametrize("state", ORDER)
def test_what_was_said_before_is_a_duplicate_however_far_the_container_is(state: str) -> None:
    entries = in_state(state)
    for reached in ORDER[: ORDER.index(state) + 1]:
        settled = told(entries, reached)
        assert (*said(settled), settled.status_after, settled.changes) == ("duplicate", None, state, ())
    assert entries.take_writes() == {}


@pytest.mark.parametrize("state", ORDER)
def test_the_first_launcher_in_the_log_has_the_container(state: str) -> None:
    entries = in_state(state)
    settled = told(entries, "provisioning", launcher="gateway2")
    assert (*said(settled), settled.status_after) == ("rejected", "seq_conflict", state)
    assert entries.take_writes() == {}


@pytest.mark.parametrize("wanted", ORDER[1:])
def test_another_launcher_may_watch_it_and_clear_it_away_but_not_bring_it_up(wanted: str) -> None:
    entries = in_state(ORDER[ORDER.index(wanted) - 1])
    settled = told(entries, wanted, launcher="gateway2")
    expected = ("rejected", "illegal_transition") if wanted in OF_THE_LAUNCHER else ("accepted", None)
    assert said(settled) == expected
    if settled.verdict == "rejected":
        assert said(told(entries, wanted)) == ("accepted", None)


@pytest.mark.parametrize("changed", [{"task_id": "t2"}, {"agent_name": "bo"}, {"backend": "docker"}])
def test_a_container_stays_with_its_task_its_agent_and_its_backend(changed: dict[str, Any]) -> None:
    for state, wanted in (("starting", "running"), ("running", "recycling")):
        entries = in_state(state)
        settled = told(entries, wanted, **changed)
        assert (*said(settled), settled.status_after) == ("rejected", "illegal_transition", state)
        assert said(told(entries, wanted)) == ("accepted", None)


def test_what_a_change_does_not_know_stays_as_it_is_known() -> None:
    entries = Entries()
    told(entries, "provisioning", host="h1")
    told(entries, "configuring", handle="process/7/99", port=None)
    row = row_of(told(entries, "starting", 4, port=8080, host=None, handle=None))
    assert (row.host, row.handle, row.port, row.error) == ("h1", "process/7/99", 8080, None)
    assert (row.created_at, row.changed_at) == (START_US, START_US + 4000)
    row = row_of(told(entries, "recycling", error="the process is gone", port=8081))
    assert (row.host, row.port, row.error) == ("h1", 8081, "the process is gone")
    row = row_of(told(entries, "recycled", error=None))
    assert (row.state, row.handle, row.error) == ("recycled", "process/7/99", "the process is gone")


STEPS = st.builds(
    lambda state, **changed: (state, changed),
    st.sampled_from(ORDER),
    launcher=st.sampled_from(("gateway1", "gateway1", "gateway2")),
    port=st.sampled_from((None, 1, 2)),
)
# Most random sequences get nowhere: these begin with some steps in the right order.
SEQUENCES = st.builds(
    lambda length, rest: [(state, {"launcher": "gateway1", "port": None}) for state in ORDER[:length]] + rest,
    st.integers(0, 5),
    st.lists(STEPS, max_size=15),
)


@given(SEQUENCES)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_a_container_goes_forward_and_each_state_is_entered_once(
    steps: list[tuple[str, dict[str, Any]]],
) -> None:
    entries, entered, launcher = Entries(), dict[str, dict[str, Any]](), ""
    for offset, (wanted, changed) in enumerate(steps):
        before, state = dict(entries.stored()), next(reversed(entered), None)
        settled = told(entries, wanted, offset, **changed)
        assert (entries.stored() == before) == (settled.verdict != "accepted") == (settled.changes == ())
        if settled.verdict == "accepted":
            assert wanted not in entered
            assert state is None or ORDER.index(wanted) > ORDER.index(state)
            launcher = launcher or changed["launcher"]
            assert wanted not in OF_THE_LAUNCHER or changed["launcher"] == launcher
            entered[wanted] = changed
            row = row_of(settled)
            ports = [one["port"] for one in entered.values() if one["port"] is not None]
            assert (row.state, row.port) == (wanted, ports[-1] if ports else None)
        elif settled.verdict == "duplicate":
            assert entered[wanted] == changed
        else:
            assert entered.get(wanted) != changed
        assert settled.status_after == next(reversed(entered), None)


def made(state: str, **changed: Any) -> containers.ContainerChange:
    """A change as a launcher makes it."""
    return containers.ContainerChange.model_validate(container_change(state, **changed))


def test_every_record_that_a_door_makes_is_accepted_and_refolded() -> None:
    records = []
    for offset, state in enumerate(ORDER):
        body = made(
            state, host="h1", handle="process/7/99", port=8080, error="a\tb" if state == "recycling" else None
        )
        made_of = body.record(door="http", principal="reactor")
        records.append(as_read(made_of, offset))
    rows, entries = accepted_and_refolded(records)
    assert {(row.wire, row.principal) for row in rows} == {(None, "reactor")}
    assert len(repr(entries.stored())) < 1000


def test_the_id_of_a_change_names_all_that_it_says_and_who_says_it() -> None:
    def id_of(state: str = "running", door: str = "http", principal: str = "ann", **changed: Any) -> str:
        return made(state, **changed).record(door=door, principal=principal).ce_id

    others = [id_of("recycling"), id_of(door="mcp"), id_of(principal="bo"), id_of(port=1), id_of(launcher="g2")]
    assert id_of() == id_of()
    assert id_of() not in others
    assert len(set(others)) == len(others)


@pytest.mark.requirement("HH-11")
@pytest.mark.parametrize(
    "changed",
    [
        {"state": "stopped"},
        {"state": None},
        {"task_id": "a/b"},
        {"agent_name": ""},
        {"backend": None},
        {"launcher": "a b"},
        {"host": "a/b"},
        {"handle": "ssh/x"},
        {"handle": "process/" + "x" * 256},
        {"port": 0},
        {"port": 65536},
        {"port": True},
        {"port": "80"},
        {"error": "x" * 501},
        {"error": "bell \a"},
        {"container": "c2"},
        {"more": 1},
    ],
)
def test_a_field_that_is_wrong_makes_a_change_malformed(changed: dict[str, Any]) -> None:
    for entries in (Entries(), in_state("running")):
        body = {**container_change(), **changed}
        assert said(hub_told(entries, "container.changed", body)) == ("rejected", "malformed")


def test_a_type_or_a_body_of_another_kind_is_malformed() -> None:
    for kind, body in (
        ("container.painted", container_change()),
        ("agent.defined", container_change()),
        ("container.changed", {"schema_version": 1, "container": "c1", "state": "provisioning"}),
    ):
        assert said(hub_told(Entries(), kind, body, key=CONTAINER_KEY)) == ("rejected", "malformed")


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", ["", "../x", "a/b", "#", "x" * 129])
def test_no_record_is_made_for_a_container_that_is_no_name(name: str) -> None:
    with pytest.raises(ValidationError):
        made("provisioning", container=name)
