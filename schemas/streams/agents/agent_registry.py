"""The records that define and remove agents (HH-01): models of their bodies."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import Capabilities, Image, Name, Printable, WireBody, models_of

AGENT_DEFINED: Final = "agent.defined"
AGENT_REMOVED: Final = "agent.removed"
REGISTRY_AGENTS: Final = "registry_agents"

DESCRIPTION_LIMIT: Final = 4000

# The values of an agent's status.
DEFINED: Final = "defined"
REMOVED: Final = "removed"


class AgentRow(Row, frozen=True, gc=False):
    """A row of `registry_agents`: a definition from `conf/agents/`, which may have been removed since."""

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
    """True if the agent runs with reduced rights."""
    defined_at: Moment
    """Time of the newest definition."""
    removed_at: Moment | None
    """Time at which the definition was removed."""


class AgentBody(WireBody):
    """The base class of the bodies of records about an agent: they all have its name."""

    STREAM: ClassVar = "agent/{agent_name}"

    agent_name: Name


class AgentRequest(AgentBody):
    """The base class of the bodies of records about an agent that a request to a door caused.

    `request_id` identifies the request; a repeated request has the same id.
    """

    IDENTITY: ClassVar = ("{origin}", "{agent_name}", "{request_id}")

    request_id: Name


class AgentDefined(AgentBody):
    """Body of `agent.defined`: the agent's new definition. The launcher decides how it runs `image`."""

    TYPE: ClassVar = AGENT_DEFINED
    IDENTITY: ClassVar = ("{origin}", "{cause}", "{content}")

    image: Image
    description: Annotated[Printable, Field(max_length=DESCRIPTION_LIMIT)]
    capabilities: Capabilities
    hardened: bool


class AgentRemoved(AgentBody):
    """Body of `agent.removed`: the agent's definition was removed."""

    TYPE: ClassVar = AGENT_REMOVED
    IDENTITY: ClassVar = ("{origin}", "{cause}", "{content}")


AGENT_MODELS: Final = models_of(AgentDefined, AgentRemoved)


def change_cause(row: AgentRow | None) -> str:
    """Return the text to pass as `cause` to the method `record` of the next change.

    The text is the time of the definition's last change, in microseconds since 1970 UTC. The `ce_id` of the new
    record is derived from this text and the new definition. A record that is sent again thus has the same
    `ce_id`. If a definition changes from A to B, back to A and to B again, the two records with B have
    different ids.

    Args:
        row: the agent's current row, or `None` if the agent was never defined. The result is then empty.
    """
    if row is None:
        return ""
    return str(row.defined_at if row.removed_at is None else row.removed_at)
