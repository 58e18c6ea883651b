"""The fold of the stream `agent/<name>`: definitions (HH-01), participants with own keys (AM-02 to AM-06).

The newest definition counts. It is the entry `agent`, and older requests are in `agent/<hex digits>`. It
remains after the agent is removed, and the agent may be defined again.

The state of a participant is the entry `participant`, older requests in `participant/<hex digits>`, and the
entries `id/<two hex digits>`, which store the signatures of the calls of the last ten minutes. `participant`
remains after the agent has stopped. The agent may then join again.

`schemas.streams.agents.mqtt_agents` folds the records about agents on MQTT.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestChunk, RequestMemory
from schemas.fold.settled import Change, Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import STOPPED, FoldInput, StreamKind, wrong_state
from schemas.fold.view_rows import row_maker
from schemas.streams.agents.agent_registry import (
    AGENT_CALLED,
    AGENT_DEFINED,
    AGENT_JOINED,
    AGENT_KEY_REGISTERED,
    AGENT_MODELS,
    AGENT_STOPPED,
    AGENT_UPDATED,
    CALLS_KEPT_S,
    DEFINED,
    INITIALIZING,
    PARTICIPANT_MODELS,
    PARTICIPANT_TRANSITIONS,
    REMOVED,
    AgentKeyRow,
    AgentRow,
    ParticipantRow,
)
from schemas.streams.agents.mqtt_agents import (
    AGENT_CONFIRMED,
    AGENT_SAID,
    MQTT_AGENT_MODELS,
    MqttAgentRow,
    settle_mqtt_agent,
)
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.wire.ids import AGENT
from trunkline_agent.wire.signing import key_id_of
from trunkline_agent.wire.verdicts import ACCEPTED, AFTER_TERMINAL, ILLEGAL_TRANSITION, UNKNOWN_STREAM

_PARTICIPANT_VERSION: Final = 1
KEYS_KEPT: Final = 8
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
_PARTICIPANT_REQUESTS: Final = StructEntries("participant/", RequestChunk)
_participant_row: Final = row_maker(ParticipantRow, ParticipantEntry)
_key_row: Final = row_maker(AgentKeyRow, KeyEntry)


def _settle_participant(given: FoldInput) -> Outcome:
    """Settle a record about a participant: update the stream state, return verdict and changed rows.

    The record lets the agent join, updates or stops it, adds or removes a key, or records that the agent made a
    signed call. `settle_agent` calls this function with a checked body. The changes of the stream state,
    `given.entries`, count only if the record is accepted.
    """
    known = _PARTICIPANT.read(given.entries)
    if given.type == AGENT_CALLED:
        return _called(given, known)
    status, requests = (None, RequestMemory()) if known is None else (known.status, known.requests)
    repeated = requests.repeated(given, _PARTICIPANT_REQUESTS, status)
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
    agent.requests.add(given, _PARTICIPANT_REQUESTS)
    _PARTICIPANT.write(given.entries, agent)
    return accepted(agent.status, changes)


def _joined(given: FoldInput, requests: RequestMemory) -> tuple[ParticipantEntry, tuple[Change, ...]]:
    body, now = given.body, given.now_us
    key = KeyEntry(key_id_of(body["public_key"]), body["public_key"], now)
    agent = ParticipantEntry(
        version=_PARTICIPANT_VERSION,
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
    calls = _CALLS.read(given.entries, shard) or _Calls(_PARTICIPANT_VERSION, {})
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
    return changed(_participant_row(agent, agent_name=name, stopped_at=stopped_at, stopped_why=why))


def _key_change(name: str, key: KeyEntry, removed_at: int | None = None) -> Change:
    status = ACTIVE if removed_at is None else REMOVED
    return changed(_key_row(key, agent_name=name, status=status, removed_at=removed_at))


ENTRY_VERSION: Final = 1
_DEFINED_FIELDS: Final = ("image", "description", "capabilities", "hardened")


class AgentEntry(msgspec.Struct, array_like=True, gc=False):
    """The stream state of an agent definition: its content, and a memory of accepted requests.

    Times are in microseconds since 1970 UTC. `removed_at` is `None` while the definition is valid.
    """

    version: int
    image: str
    description: str
    capabilities: list[str]
    hardened: bool
    defined_at: int
    removed_at: int | None
    requests: RequestMemory

    @property
    def status(self) -> str:
        """The status of the definition: `defined`, or `removed` if it was removed."""
        return DEFINED if self.removed_at is None else REMOVED


_AGENT: Final = StructEntries("agent", AgentEntry)
_REQUESTS: Final = StructEntries("agent/", RequestChunk)
_row: Final = row_maker(AgentRow, AgentEntry)


def settle_agent(given: FoldInput) -> Outcome:
    """Settle a record of `agent/<name>`: update the stream state, return verdict and changed rows.

    The record defines an agent or removes the definition. A record about a participant or about MQTT is passed
    to `settle_participant` or `settle_mqtt_agent`. `schemas.streams.fold.settle` calls this function with a
    checked body. The changes of the stream state, `given.entries`, count only if the record is accepted.
    """
    if given.type in PARTICIPANT_MODELS:
        return _settle_participant(given)
    if given.type in MQTT_AGENT_MODELS:
        return settle_mqtt_agent(given)
    return _settle_definition(given)


def _settle_definition(given: FoldInput) -> Outcome:
    known = _AGENT.read(given.entries)
    if known is None:
        if given.type != AGENT_DEFINED:
            return rejected(UNKNOWN_STREAM, "no agent with this name")
        agent = _defined(given, RequestMemory())
    else:
        if _says_what_is_known(given, known):
            return duplicate(known.status)
        # A record that is sent again after a later one changed the definition must not restore the old one.
        repeated = known.requests.repeated(
            given, _REQUESTS, known.status, "this id was used with other content"
        )
        if repeated is not None:
            return repeated
        agent = known
        if given.type == AGENT_DEFINED:
            agent = _defined(given, known.requests)
        else:
            agent.removed_at = given.now_us
    agent.requests.add(given, _REQUESTS)
    _AGENT.write(given.entries, agent)
    return accepted(agent.status, (changed(_row(agent, agent_name=given.name, status=agent.status)),))


def _defined(given: FoldInput, requests: RequestMemory) -> AgentEntry:
    return AgentEntry(
        version=ENTRY_VERSION,
        **{name: given.body[name] for name in _DEFINED_FIELDS},
        defined_at=given.now_us,
        removed_at=None,
        requests=requests,
    )


def _says_what_is_known(given: FoldInput, agent: AgentEntry) -> bool:
    if given.type != AGENT_DEFINED:
        return agent.status == REMOVED
    is_same = all(getattr(agent, name) == given.body[name] for name in _DEFINED_FIELDS)
    return agent.status == DEFINED and is_same


AGENT_KIND: Final = StreamKind(
    name=AGENT,
    models={**AGENT_MODELS, **PARTICIPANT_MODELS, **MQTT_AGENT_MODELS},
    settle=settle_agent,
    row_of_each_stream=(AgentRow, ParticipantRow, MqttAgentRow),
    rows=(AgentRow,),
    later_rows=(ParticipantRow, AgentKeyRow, MqttAgentRow),
    named_by="agent_name",
    foreign_types=frozenset({AGENT_SAID, AGENT_CONFIRMED}),
)
