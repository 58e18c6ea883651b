"""The fold of the organism (XP-09, XP-11), and that of threads (XP-07)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.control import organism
from schemas.streams.control.organism import loaded_digest, organism_version
from schemas.streams.fold import settle
from schemas.streams.thread.threads import ThreadOpened, ThreadRow
from tests.random_records import thread_record
from tests.schemas.hub_records import PUMP_GOOD
from tests.schemas.job_records import KEYRING, START_US, document_record, said
from tests.schemas.stream_records import as_read

S_US = 1_000_000
FAST = organism.Listener(name="fast", root_tag="search", namespace="urn:s", concurrency=2)
SLOW = organism.Listener(name="slow", root_tag="search", namespace="urn:s")


def told(entries: Entries, body: Any, offset_us: int = 0) -> Settled:
    """Settle a change of the organism."""
    made = body.record(door="xml", principal="operator")
    record = msgspec.structs.replace(as_read(made), logged_at_us=START_US + offset_us)
    return settle(record, entries, KEYRING, Entries())


def loaded(request: str, *listeners: organism.Listener, digest: str = "5e") -> organism.OrganismLoaded:
    """A load of these listeners."""
    return organism.OrganismLoaded(request_id=request, digest=digest * 32, listeners=list(listeners))


def rows(settled: Settled) -> dict[str, str]:
    """Listener to status, of those that have changed."""
    return {c.row.listener: c.row.status for c in settled.changes if isinstance(c.row, organism.ListenerRow)}


@pytest.mark.requirement("XP-09")
def test_a_load_leaves_these_listeners_and_no_others_and_touches_none_that_stays() -> None:
    entries = Entries()
    assert (organism_version(entries), loaded_digest(entries)) == (0, None)
    assert rows(told(entries, loaded("r1", FAST, SLOW))) == {"fast": "active", "slow": "active"}
    changed = SLOW.model_copy(update={"concurrency": 3})
    assert rows(told(entries, loaded("r2", FAST, changed, digest="7a"))) == {"slow": "active"}
    assert rows(told(entries, loaded("r3", changed))) == {"fast": "removed"}
    # The same file again changes no row, and is a change all the same.
    assert (rows(told(entries, loaded("r4", changed))), organism_version(entries)) == ({}, 4)
    assert loaded_digest(entries) == "5e" * 32
    assert said(told(entries, loaded("r5", FAST, FAST))) == ("rejected", "illegal_transition")


@pytest.mark.requirement("XP-11")
def test_a_listener_is_added_and_removed_once_and_comes_back_as_new() -> None:
    entries = Entries()
    assert rows(told(entries, organism.ListenerAdded(request_id="r1", listener=FAST))) == {"fast": "active"}
    again = organism.ListenerAdded(request_id="r2", listener=FAST)
    assert said(told(entries, again)) == ("rejected", "illegal_transition")
    removed = told(entries, organism.ListenerRemoved(request_id="r3", name="fast"), S_US)
    assert rows(removed) == {"fast": "removed"}
    (change,) = removed.changes
    assert isinstance(change.row, organism.ListenerRow)
    assert (change.row.added_at, change.row.removed_at) == (START_US, START_US + S_US)
    assert said(told(entries, organism.ListenerRemoved(request_id="r4", name="fast"))) == (
        "rejected",
        "unknown_stream",
    )
    assert rows(told(entries, again, 2 * S_US)) == {"fast": "active"}


@pytest.mark.requirement("XP-11")
def test_a_command_that_comes_again_within_a_quarter_of_an_hour_changes_nothing() -> None:
    entries = Entries()
    add = organism.ListenerAdded(request_id="r1", listener=FAST)
    assert said(told(entries, add)) == ("accepted", None)
    told(entries, organism.ListenerRemoved(request_id="r2", name="fast"))
    assert said(told(entries, add, 900 * S_US - 1)) == ("duplicate", None)
    other = organism.ListenerAdded(request_id="r1", listener=SLOW)
    assert said(told(entries, other, S_US)) == ("rejected", "seq_conflict")
    # By then its time stamp is too old for the door.
    assert said(told(entries, add, 900 * S_US)) == ("accepted", None)


@pytest.mark.parametrize(
    "listener",
    [
        {"name": "a/b", "root_tag": "x"},
        {"name": "a", "root_tag": "1x"},
        {"name": "a", "root_tag": "x", "handler": "os.system"},
        {"name": "a", "root_tag": "x", "namespace": "a b"},
        {"name": "a", "root_tag": "x", "concurrency": 0},
        {"name": "a", "root_tag": "x", "more": 1},
    ],
)
def test_what_is_no_listener_is_malformed(listener: dict[str, Any]) -> None:
    body = {"schema_version": 1, "request_id": "r1", "listener": listener}
    record = document_record(body, "listener.added", key=b"control/organism")
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "malformed")


def opened(**changed: Any) -> ThreadOpened:
    """A thread's opening, with fields changed."""
    _, body = PUMP_GOOD["thread.opened"]
    return ThreadOpened.model_validate({**body, **changed})


@pytest.mark.requirement("XP-07")
def test_a_thread_is_opened_once_at_one_place_of_the_tree() -> None:
    entries = Entries()

    def settled(body: ThreadOpened, ce_id: str) -> Settled:
        made = thread_record(body, ce_id)
        return settle(as_read(made), entries, KEYRING, Entries())

    first = settled(opened(), "e1")
    (change,) = first.changes
    assert isinstance(change.row, ThreadRow)
    assert (change.row.opened_by, change.row.seen_by, change.row.parent_thread) == ("ann", "fast", "t0")
    # Two gateways may see another message as the first of it.
    assert said(settled(opened(message_id="m2", kind="other"), "e1")) == ("duplicate", None)
    assert said(settled(opened(opened_by="eve"), "e2")) == ("rejected", "seq_conflict")
