"""The records about agents (HH-01): wire models and how a door makes the records."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from schemas.fold.view_rows import Moment, Row
from schemas.wire.ids import AGENT, stream_key
from schemas.wire.record import OutgoingRecord, content_id
from schemas.wire.strict_json import canonical
from schemas.wire.wire_body import Capabilities, Image, Name, Printable, WireBody

AGENT_DEFINED: Final = "agent.defined"
AGENT_REMOVED: Final = "agent.removed"
REGISTRY_AGENTS: Final = "registry_agents"

DESCRIPTION_LIMIT: Final = 4000

# What an agent's row says of it.
DEFINED: Final = "defined"
REMOVED: Final = "removed"


class AgentRow(Row, frozen=True, gc=False):
    """A row of `registry_agents`: a definition out of `conf/agents/`, or that there is none any more."""

    VIEW: ClassVar = REGISTRY_AGENTS
    KEY: ClassVar = ("agent_name",)

    agent_name: str
    """Name of the agent."""
    status: str
    """`defined`, or `removed` after the file was deleted."""
    image: str
    """Image that the launcher runs for the agent."""
    description: str
    """Description in the definition."""
    capabilities: list[str]
    """Names of what the agent can do."""
    hardened: bool
    """Whether the agent runs with reduced rights."""
    defined_at: Moment
    """Time of the newest definition."""
    removed_at: Moment | None
    """Time at which the definition was removed."""


class _AgentBody(WireBody):
    agent_name: Name


class AgentDefined(_AgentBody):
    """Body of `agent.defined`: what the agent is from now on. What an `image` is, the launcher knows."""

    image: Image
    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)]
    capabilities: Capabilities
    hardened: bool


class AgentRemoved(_AgentBody):
    """Body of `agent.removed`: there is no definition any more."""


AGENT_MODELS: Final[dict[str, type[_AgentBody]]] = {AGENT_DEFINED: AgentDefined, AGENT_REMOVED: AgentRemoved}


def change_cause(row: AgentRow | None) -> str:
    """The `cause` for a record that changes what `row` says: when that was said. None: nothing is known yet.

    The content of the definition before would not do: A, B, A, B has B twice after A.
    """
    if row is None:
        return ""
    return str(row.defined_at if row.removed_at is None else row.removed_at)


def definition_record(body: AgentDefined, *, cause: str, door: str, principal: str) -> OutgoingRecord:
    """The record that defines an agent. `cause` (`change_cause`) tells a definition that is made again after
    another from one that is sent again.
    """
    return _record(AGENT_DEFINED, body, cause, door, principal)


def removal_record(agent_name: str, *, cause: str, door: str, principal: str) -> OutgoingRecord:
    """The record that removes an agent's definition. Raises pydantic.ValidationError for what is no name."""
    return _record(AGENT_REMOVED, AgentRemoved(agent_name=agent_name), cause, door, principal)


def _record(record_type: str, body: _AgentBody, cause: str, door: str, principal: str) -> OutgoingRecord:
    value = canonical(body.model_dump(mode="json"))
    return OutgoingRecord(
        stream=stream_key(AGENT, body.agent_name),
        ce_id=content_id(record_type.encode(), f"{door}/{principal}".encode(), cause.encode(), value),
        door=door,
        principal=principal,
        type=record_type,
        value=value,
    )
