"""The fold of the records about participants, agents with their own keys, in `agent/<name>` (AM-02 to AM-06).

The state is the entry `participant`, older requests in `participant/<hex digits>`, and the entries
`id/<two hex digits>`, which store the signatures of the calls of the last ten minutes. `participant` remains
after the agent has stopped. The agent may then join again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.life_cycles import STOPPED, wrong_state
from schemas.fold.memories import RequestChunk, RequestMemory
from schemas.fold.settled import Change, Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.fold.view_rows import row_maker
from schemas.streams.agents.participants import (
    AGENT_CALLED,
    AGENT_JOINED,
    AGENT_KEY_REGISTERED,
    AGENT_STOPPED,
    AGENT_UPDATED,
    CALLS_KEPT_S,
    INITIALIZING,
    PARTICIPANT_TRANSITIONS,
    AgentKeyRow,
    ParticipantRow,
)
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.wire.public_keys import key_id_of
from trunkline_agent.wire.verdicts import ACCEPTED, AFTER_TERMINAL, ILLEGAL_TRANSITION, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
KEYS_KEPT: Final = 8
REMOVED: Final = "removed"
_SIGNATURE_BYTES: Final = 16


class KeyEntry(msgspec.Struct, array_like=True, gc=False):
    """A public key of a participant, as part of `ParticipantEntry`.

    `valid_until` is `None` for the newest key. The registration of a newer key sets it. Times are in
    microseconds since 1970 UTC.
    """

    key_id: str
    public_key: str
    registered_at: int
    valid_until: int | None = None


class ParticipantEntry(msgspec.Struct, array_like=True, gc=False):
    """The stream state of a participant: the fields of its row, its keys, and a memory of accepted requests.

    Times are in microseconds since 1970 UTC.
    """

    version: int
    status: str
    task: str
    capabilities: list[str]
    task_id: str | None
    started_at: int
    updated_at: int
    requests: RequestMemory
    keys: list[KeyEntry]


class _Calls(msgspec.Struct, array_like=True, gc=False):
    """The first 16 bytes of each signature with its time (microseconds since 1970 UTC), oldest first."""

    version: int
    signatures: dict[bytes, int]


_PARTICIPANT: Final = StructEntries("participant", ParticipantEntry)
_CALLS: Final = StructEntries("id/", _Calls)
_REQUESTS: Final = StructEntries("participant/", RequestChunk)
_row: Final = row_maker(ParticipantRow, ParticipantEntry)
_key_row: Final = row_maker(AgentKeyRow, KeyEntry)


def settle_participant(given: FoldInput) -> Outcome:
    """Settle a record about a participant: update the stream state, return verdict and changed rows.

    The record lets the agent join, updates or stops it, adds or removes a key, or records that the agent made a
    signed call. `settle_agent` calls this function with a checked body. The changes of the stream state,
    `given.entries`, count only if the record is accepted.
    """
    known = _PARTICIPANT.read(given.entries)
    if given.type == AGENT_CALLED:
        return _called(given, known)
    status, requests = (None, RequestMemory()) if known is None else (known.status, known.requests)
    repeated = requests.repeated(given, _REQUESTS, status)
    if repeated is not None:
        return repeated
    if given.type == AGENT_JOINED:
        if known is not None and INITIALIZING not in PARTICIPANT_TRANSITIONS[known.status]:
            return rejected(ILLEGAL_TRANSITION, "an agent of this name takes part already", known.status)
        agent, changes = _joined(given, requests)
    elif known is None or known.status == STOPPED:
        return _absent(known)
    else:
        agent = known
        outcome = _apply(given, agent)
        if outcome.verdict != ACCEPTED:
            return outcome
        changes = outcome.changes
    agent.requests.add(given, _REQUESTS)
    _PARTICIPANT.write(given.entries, agent)
    return accepted(agent.status, changes)


def _joined(given: FoldInput, requests: RequestMemory) -> tuple[ParticipantEntry, tuple[Change, ...]]:
    body, now = given.body, given.now_us
    key = KeyEntry(key_id_of(body["public_key"]), body["public_key"], now)
    agent = ParticipantEntry(
        version=ENTRY_VERSION,
        status=INITIALIZING,
        task=body["task"],
        capabilities=body["capabilities"],
        task_id=body.get("task_id"),
        started_at=now,
        updated_at=now,
        requests=requests,
        keys=[key],
    )
    return agent, (_change(given.name, agent), _key_change(given.name, key))


def _apply(given: FoldInput, agent: ParticipantEntry) -> Outcome:
    """Change `agent`, or return the rejection."""
    name, body, now = given.name, given.body, given.now_us
    allowed = {agent.status, *PARTICIPANT_TRANSITIONS[agent.status]}
    if given.type == AGENT_UPDATED:
        status = body.get("status") or agent.status
        capabilities = agent.capabilities if body.get("capabilities") is None else body["capabilities"]
        if (status, capabilities) == (agent.status, agent.capabilities):
            return duplicate(agent.status)
        if status not in allowed:
            return wrong_state(PARTICIPANT_TRANSITIONS, agent.status, "agent")
        agent.status, agent.capabilities, agent.updated_at = status, capabilities, now
        return accepted(status, (_change(name, agent),))
    if given.type == AGENT_STOPPED:
        if STOPPED not in allowed:
            return wrong_state(PARTICIPANT_TRANSITIONS, agent.status, "agent")
        agent.status, agent.updated_at = STOPPED, now
        gone, agent.keys = agent.keys, []
        stopped = _change(name, agent, stopped_at=now, why=body.get("reason") or None)
        return accepted(agent.status, (stopped, *(_key_change(name, key, now) for key in gone)))
    if given.type == AGENT_KEY_REGISTERED:
        return _key_registered(given, agent)
    gone = [key for key in agent.keys if key.key_id == body["key_id"]]
    if not gone:
        return rejected(UNKNOWN_STREAM, "the agent has no such key", agent.status)
    agent.keys = [key for key in agent.keys if key.key_id != body["key_id"]]
    return accepted(agent.status, tuple(_key_change(name, key, now) for key in gone))


def _key_registered(given: FoldInput, agent: ParticipantEntry) -> Outcome:
    name, body, now = given.name, given.body, given.now_us
    key_id, until = key_id_of(body["public_key"]), now + body["overlap_ms"] * 1000
    if any(key.key_id == key_id for key in agent.keys):
        return rejected(ILLEGAL_TRANSITION, "the agent has this key already", agent.status)
    changes = []
    keys = []
    for key in agent.keys:
        if key.valid_until is None or key.valid_until > until:
            key.valid_until = until
        # Expired keys are removed, and the oldest keys beyond the limit.
        is_over = key.valid_until <= now
        changes.append(_key_change(name, key, now if is_over else None))
        if not is_over:
            keys.append(key)
    while len(keys) >= KEYS_KEPT:
        changes.append(_key_change(name, keys.pop(0), now))
    key = KeyEntry(key_id, body["public_key"], now)
    agent.keys = [*keys, key]
    return accepted(agent.status, (*changes, _key_change(name, key)))


def _absent(known: ParticipantEntry | None) -> Outcome:
    """Return the rejection of a record about an agent that never took part or has stopped."""
    if known is None:
        return rejected(UNKNOWN_STREAM, "no agent of this name takes part")
    return rejected(AFTER_TERMINAL, "the agent has stopped", known.status)


def _called(given: FoldInput, known: ParticipantEntry | None) -> Outcome:
    if known is None or known.status == STOPPED:
        return _absent(known)
    signature = bytes.fromhex(given.body["signature"])[:_SIGNATURE_BYTES]
    shard = given.body["signature"][:2]
    calls = _CALLS.read(given.entries, shard) or _Calls(ENTRY_VERSION, {})
    oldest = given.now_us - CALLS_KEPT_S * 1_000_000
    if calls.signatures.get(signature, oldest) > oldest:
        return duplicate(known.status)
    calls.signatures = {one: at for one, at in calls.signatures.items() if at > oldest}
    calls.signatures[signature] = given.now_us
    _CALLS.write(given.entries, calls, shard)
    return accepted(known.status)


def _change(
    name: str, agent: ParticipantEntry, stopped_at: int | None = None, why: str | None = None
) -> Change:
    return changed(_row(agent, agent_name=name, stopped_at=stopped_at, stopped_why=why))


def _key_change(name: str, key: KeyEntry, removed_at: int | None = None) -> Change:
    status = ACTIVE if removed_at is None else REMOVED
    return changed(_key_row(key, agent_name=name, status=status, removed_at=removed_at))
