"""Participants: who takes part, with which keys, and that a signature is good once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.agents import agent_fold
from schemas.streams.agents.agent_registry import (
    CALLS_KEPT_S,
    AgentCalled,
    AgentJoined,
    AgentKeyRegistered,
    AgentKeyRow,
    AgentUpdated,
    ParticipantRow,
)
from tests.schemas.hub_records import (
    call,
    definition,
    hub_told,
    joining,
    key_registration,
    of_participant,
    public_key,
)
from tests.schemas.job_records import START_US, said
from trunkline_agent.wire.signing import key_id_of

pytestmark = pytest.mark.requirement("AM-03")

OFFSET_US = 1000  # of the log's clock between two offsets of the tests


def told(
    entries: Entries, kind: str, body: dict[str, Any], offset: int = 0, ce_id: str | None = None
) -> Settled:
    return hub_told(entries, f"agent.{kind}", body, offset=offset, ce_id=ce_id)


def after_s(seconds: float) -> int:
    return round(seconds * 1_000_000 / OFFSET_US)


def row_of(settled: Settled) -> ParticipantRow:
    (found,) = [change.row for change in settled.changes if change.view == "registry_participants"]
    assert isinstance(found, ParticipantRow)
    return found


def keys_of(settled: Settled) -> dict[str, AgentKeyRow]:
    return {change.row.key_id: change.row for change in settled.changes if isinstance(change.row, AgentKeyRow)}


def joined(**changed: Any) -> Entries:
    entries = Entries()
    assert told(entries, "joined", joining(**changed)).verdict == "accepted"
    entries.take_writes()
    return entries


@pytest.mark.requirement("AM-06")
def test_who_joins_is_initializing_and_has_one_key() -> None:
    settled = told(Entries(), "joined", joining(), offset=2)
    assert row_of(settled) == ParticipantRow(
        agent_name="coder",
        status="initializing",
        task="count the stars",
        capabilities=["count"],
        task_id="t1",
        started_at=START_US + 2000,
        updated_at=START_US + 2000,
        stopped_at=None,
        stopped_why=None,
    )
    (key,) = keys_of(settled).values()
    assert (key.key_id, key.public_key, key.status) == (key_id_of(public_key()), public_key(), "active")
    assert (key.valid_until, key.removed_at) == (None, None)


def test_a_name_is_taken_while_its_agent_takes_part_and_free_after_it_has_stopped() -> None:
    entries = joined()
    assert told(entries, "joined", joining("p1"), 1).verdict == "duplicate"
    assert said(told(entries, "joined", joining("p1", task="x"), 1)) == ("rejected", "seq_conflict")
    assert said(told(entries, "joined", joining("p9"), 1)) == ("rejected", "illegal_transition")
    stopped = told(entries, "stopped", of_participant("p5", reason="done"), 3)
    row = row_of(stopped)
    assert (row.status, row.stopped_at, row.stopped_why) == ("stopped", START_US + 3000, "done")
    assert [key.status for key in keys_of(stopped).values()] == ["removed"]
    again = told(entries, "joined", joining("p9", task_id=None), 4)
    assert (row_of(again).status, row_of(again).started_at, row_of(again).stopped_at) == (
        "initializing",
        START_US + 4000,
        None,
    )


@pytest.mark.parametrize("kind", ["key_registered", "key_removed", "updated", "stopped", "called"])
def test_nothing_is_taken_of_who_never_joined_or_has_stopped(kind: str) -> None:
    bodies = {
        "key_registered": key_registration("q"),
        "key_removed": of_participant("q", key_id="0" * 16),
        "updated": of_participant("q", status="idle"),
        "stopped": of_participant("q"),
        "called": call(),
    }
    assert said(told(Entries(), kind, bodies[kind])) == ("rejected", "unknown_stream")
    entries = joined()
    assert told(entries, "stopped", of_participant("p5"), 1).verdict == "accepted"
    before = dict(entries.stored())
    assert said(told(entries, kind, bodies[kind], 2)) == ("rejected", "after_terminal")
    assert entries.stored() == before


@pytest.mark.requirement("AM-04")
def test_an_update_changes_what_it_says_and_the_same_again_nothing() -> None:
    entries = joined()
    row = row_of(told(entries, "updated", of_participant("u1", status="working"), 1))
    assert (row.status, row.capabilities, row.updated_at) == ("working", ["count"], START_US + 1000)
    row = row_of(told(entries, "updated", of_participant("u2", capabilities=["a", "b"]), 2))
    assert (row.status, row.capabilities) == ("working", ["a", "b"])
    same = told(entries, "updated", of_participant("u3", status="working", capabilities=["a", "b"]), 3)
    assert (same.verdict, same.changes) == ("duplicate", ())
    for status in ("stopped", "initializing", "happy", ""):
        refused = told(entries, "updated", of_participant("u4", status=status), 4)
        assert said(refused) == ("rejected", "malformed")


def test_a_new_key_leaves_the_old_ones_their_overlap() -> None:
    entries = joined()
    keys = keys_of(told(entries, "key_registered", key_registration(overlap_ms=60_000), 1))
    old, new = keys[key_id_of(public_key("one"))], keys[key_id_of(public_key("two"))]
    assert (old.status, old.valid_until) == ("active", START_US + 1000 + 60_000_000)
    assert (new.status, new.valid_until) == ("active", None)
    # A longer overlap later does not lengthen the first one's; what is over goes.
    late = after_s(61)
    keys = keys_of(
        told(entries, "key_registered", key_registration("p8", public_key=public_key("three")), late)
    )
    assert keys[old.key_id].status == "removed"
    assert keys[new.key_id].valid_until == START_US + late * OFFSET_US + 60_000_000
    again = told(entries, "key_registered", key_registration("p9", public_key=public_key("three")), late + 1)
    assert said(again) == ("rejected", "illegal_transition")


def test_a_removed_key_is_gone_and_only_that_one() -> None:
    entries = joined()
    told(entries, "key_registered", key_registration(), 1)
    first = key_id_of(public_key())
    removed = told(entries, "key_removed", of_participant("p3", key_id=first), 2)
    assert {name: key.status for name, key in keys_of(removed).items()} == {first: "removed"}
    assert said(told(entries, "key_removed", of_participant("p6", key_id=first), 3)) == (
        "rejected",
        "unknown_stream",
    )
    stopped = keys_of(told(entries, "stopped", of_participant("p5"), 4))
    assert list(stopped) == [key_id_of(public_key("two"))]


def test_no_more_than_a_few_keys_are_kept() -> None:
    entries, active = joined(), {key_id_of(public_key())}
    for n in range(30):
        body = key_registration(f"k{n}", public_key=public_key(str(n)), overlap_ms=10**9)
        for key_id, key in keys_of(told(entries, "key_registered", body, n + 1)).items():
            (active.add if key.status == "active" else active.discard)(key_id)
        assert len(active) == min(n + 2, agent_fold.KEYS_KEPT)
    assert key_id_of(public_key("29")) in active


@pytest.mark.requirement("AM-02")
def test_a_signature_is_good_once_for_ten_minutes() -> None:
    entries = joined()
    assert told(entries, "called", call("ab" * 32), 0, "a").verdict == "accepted"
    assert told(entries, "called", call("cd" * 32), 1, "b").verdict == "accepted"
    # By another gateway, under another id, with another tool: a replay all the same.
    for offset, tool in ((2, "send_to_agent"), (after_s(CALLS_KEPT_S) - 1, "mark_read")):
        replay = told(entries, "called", call("ab" * 32, tool), offset, f"again{offset}")
        assert (replay.verdict, replay.changes) == ("duplicate", ())
    assert told(entries, "called", call("ab" * 32), after_s(CALLS_KEPT_S), "later").verdict == "accepted"


@pytest.mark.requirement("AM-02")
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_whatever_comes_a_call_is_accepted_if_its_signature_was_not_within_the_window(
    steps: list[tuple[int, int]],
) -> None:
    entries, now_s, accepted_at = joined(), 0, dict[int, int]()
    for signature, wait_s in steps:
        now_s += wait_s
        # All in one shard: they share their first digits.
        said_now = told(
            entries, "called", call(f"00{signature:02x}" + "ee" * 30), after_s(now_s), f"c{now_s}-{signature}"
        )
        is_new = signature not in accepted_at or now_s - accepted_at[signature] >= CALLS_KEPT_S
        assert said_now.verdict == ("accepted" if is_new else "duplicate")
        if is_new:
            accepted_at[signature] = now_s
    shards = [msgspec.msgpack.decode(v) for k, v in entries.stored().items() if k.startswith("id/")]
    assert all(len(signatures) <= 6 for _, signatures in shards)


@pytest.mark.parametrize(
    "pem",
    [
        "",
        "x",
        public_key().strip(),
        public_key().replace("PUBLIC", "PRIVATE"),
        public_key()[:-27] + "\n-----END PUBLIC KEY-----\n",
        public_key().replace("dGhl", "dG\x00l"),
        "-----BEGIN PUBLIC KEY-----\n" + "A" * 5000 + "\n-----END PUBLIC KEY-----\n",
        "-----BEGIN PUBLIC KEY-----\nÄÄÄ=\n-----END PUBLIC KEY-----\n",
    ],
)
def test_what_has_not_the_form_of_a_public_key_is_malformed(pem: str) -> None:
    assert said(told(Entries(), "joined", joining(public_key=pem))) == ("rejected", "malformed")
    with pytest.raises(ValidationError):
        AgentJoined(agent_name="a", request_id="r", task="", capabilities=[], public_key=pem)


def test_a_definition_and_a_participant_of_one_name_do_not_disturb_each_other() -> None:
    entries = joined()
    assert told(entries, "defined", definition(), 1, "d").verdict == "accepted"
    assert told(entries, "updated", of_participant("u", status="idle"), 2).verdict == "accepted"
    removal = {"schema_version": 1, "agent_name": "coder"}
    assert told(entries, "removed", removal, 3, "r").verdict == "accepted"
    assert told(entries, "updated", of_participant("v", status="working"), 4).verdict == "accepted"


def test_the_id_of_a_record_names_who_asks_and_the_request() -> None:
    def ce_id(body: Any, principal: str = "operator") -> str:
        return body.record(door="mcp", principal=principal).ce_id

    update = AgentUpdated(agent_name="a", request_id="r", status="idle")
    others = [
        ce_id(update, "bo"),
        ce_id(AgentUpdated(agent_name="b", request_id="r")),
        ce_id(AgentUpdated(agent_name="a", request_id="s")),
        ce_id(AgentCalled(agent_name="a", signature="ab" * 32, tool="t")),
        ce_id(AgentCalled(agent_name="a", signature="cd" * 32, tool="t")),
        ce_id(AgentKeyRegistered(agent_name="a", request_id="r", public_key=public_key(), overlap_ms=0)),
    ]
    assert len({ce_id(update), *others}) == len(others) + 1
    assert ce_id(AgentUpdated(agent_name="a", request_id="r", status="blocked")) == ce_id(update)
