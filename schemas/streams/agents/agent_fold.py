"""The fold of agent definitions in the stream `agent/<name>` (HH-01). The newest definition counts.

`settle_agent` passes the other records of that stream to `participant_fold` and `mqtt_agent_fold`.

The state is the entry `agent`, and older requests in `agent/<hex digits>`. It remains after the agent is
removed, and the agent may be defined again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestChunk, RequestMemory
from schemas.fold.settled import Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import row_maker
from schemas.streams.agents.agent_registry import AGENT_DEFINED, AGENT_MODELS, DEFINED, REMOVED, AgentRow
from schemas.streams.agents.mqtt_agent_fold import settle_mqtt_agent
from schemas.streams.agents.mqtt_agents import (
    AGENT_CONFIRMED,
    AGENT_SAID,
    MQTT_AGENT_MODELS,
    MqttAgentRow,
)
from schemas.streams.agents.participant_fold import settle_participant
from schemas.streams.agents.participants import PARTICIPANT_MODELS, AgentKeyRow, ParticipantRow
from trunkline_agent.wire.ids import AGENT
from trunkline_agent.wire.verdicts import UNKNOWN_STREAM

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
        return settle_participant(given)
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
