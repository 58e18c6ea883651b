"""The fold of definitions in `agent/<name>` (HH-01): what an agent is, by its newest definition. The rest of
that stream is in `participant_fold`.

One entry, `agent`. An agent that was removed keeps it, and may be defined again.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold.entries import Entries
from schemas.fold.request_memory import RequestMemory
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import REGISTRY_AGENTS, AgentRow
from schemas.streams.agents.agent_registry import DEFINED, REMOVED
from schemas.wire.record import AGENT_DEFINED, Envelope, Record
from schemas.wire.verdicts import SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
_AGENT: Final = "agent"


class AgentEntry(msgspec.Struct, array_like=True, gc=False):
    """All that is known of an agent; the fields of its row, and the records that were settled."""

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
        """What the row says of it."""
        return DEFINED if self.removed_at is None else REMOVED


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(AgentEntry).decode


def settle_agent(
    record: Record, envelope: Envelope, name: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    """Settle one record of the agent's stream whose body passed the checks of its wire model."""
    raw = entries.get(_AGENT)
    known = None if raw is None else _decode(raw)
    if known is None:
        if envelope.type != AGENT_DEFINED:
            return rejected(UNKNOWN_STREAM, "no agent with this name")
        agent = _defined(record, body, RequestMemory())
    else:
        if _says_what_is_known(envelope.type, body, known):
            return duplicate(known.status)
        # One that comes late, after another has changed what it said, must not bring it back.
        seen = known.requests.seen(envelope.ce_id, body)
        if seen == "same":
            return duplicate(known.status)
        if seen == "other":
            return rejected(SEQ_CONFLICT, "this id was used with other content", known.status)
        agent = known
        if envelope.type == AGENT_DEFINED:
            agent = _defined(record, body, known.requests)
        else:
            agent.removed_at = record.logged_at_us
    agent.requests.add(envelope.ce_id, body)
    entries.put(_AGENT, _encode(agent))
    return accepted(agent.status, (_change(name, agent),))


def _defined(record: Record, body: dict[str, Any], requests: RequestMemory) -> AgentEntry:
    return AgentEntry(
        version=ENTRY_VERSION,
        image=body["image"],
        description=body["description"],
        capabilities=body["capabilities"],
        hardened=body["hardened"],
        defined_at=record.logged_at_us,
        removed_at=None,
        requests=requests,
    )


def _says_what_is_known(kind: str, body: dict[str, Any], agent: AgentEntry) -> bool:
    if kind != AGENT_DEFINED:
        return agent.status == REMOVED
    return agent.status == DEFINED and (
        (agent.image, agent.description, agent.capabilities, agent.hardened)
        == (body["image"], body["description"], body["capabilities"], body["hardened"])
    )


def _change(name: str, agent: AgentEntry) -> Change:
    row = AgentRow(
        agent_name=name,
        status=agent.status,
        image=agent.image,
        description=agent.description,
        capabilities=agent.capabilities,
        hardened=agent.hardened,
        defined_at=agent.defined_at,
        removed_at=agent.removed_at,
    )
    return Change(REGISTRY_AGENTS, name, row)
