"""The records that define agents (HH-01), and those of participants, agents with own keys (AM-03 to AM-06).

They share the stream `agent/<name>`. This module has the models of their bodies, their rows, and the function
that builds the records.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from schemas.fold.stream_kind import STOPPED
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import (
    OVERLAP_LIMIT_MS,
    TASK_TEXT_LIMIT,
    Capabilities,
    Image,
    Name,
    Note,
    Printable,
    WireBody,
    models_of,
)
from trunkline_agent.wire.signing import public_key_der

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


AGENT_JOINED: Final = "agent.joined"
AGENT_KEY_REGISTERED: Final = "agent.key_registered"
AGENT_KEY_REMOVED: Final = "agent.key_removed"
AGENT_UPDATED: Final = "agent.updated"
AGENT_STOPPED: Final = "agent.stopped"
AGENT_CALLED: Final = "agent.called"
REGISTRY_PARTICIPANTS: Final = "registry_participants"
REGISTRY_KEYS: Final = "registry_keys"
PRESENT: Final = "present"
"""The list of the participants that have not stopped."""

INITIALIZING: Final = "initializing"
IDLE: Final = "idle"
WORKING: Final = "working"
BLOCKED: Final = "blocked"
PARTICIPANT_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    INITIALIZING: frozenset({IDLE, WORKING, BLOCKED, STOPPED}),
    IDLE: frozenset({WORKING, BLOCKED, STOPPED}),
    WORKING: frozenset({IDLE, BLOCKED, STOPPED}),
    BLOCKED: frozenset({IDLE, WORKING, STOPPED}),
    # A stopped agent may join again.
    STOPPED: frozenset({INITIALIZING}),
}
PARTICIPANT_STATES: Final = tuple(PARTICIPANT_TRANSITIONS)

KEY_LIMIT: Final = 4096
# The signature of a mutating call is remembered for this time, by Kafka's append times (AM-02). It is longer
# than the time for which a signature is valid.
CALLS_KEPT_S: Final = 600


def _pem(text: str) -> str:
    public_key_der(text)
    return text


PublicKey = Annotated[str, Field(max_length=KEY_LIMIT), AfterValidator(_pem)]
"""A SubjectPublicKeyInfo in PEM (RFC 7468, section 13). The door has checked the type and size of the key."""
KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}\z")]
"""The id of a key, as `key_id_of` returns it."""


def list_of_agent(agent_name: str) -> str:
    """Return the name of the list of a participant's active keys."""
    return f"agent/{agent_name}"


def list_of_key(key_id: str) -> str:
    """Return the name of the list of the active keys with an id, which several participants may have."""
    return f"key/{key_id}"


class ParticipantRow(Row, frozen=True, gc=False):
    """A row of `registry_participants`: an agent with its own keys and mailbox (AM-06)."""

    VIEW: ClassVar = REGISTRY_PARTICIPANTS
    KEY: ClassVar = ("agent_name",)
    ORDER: ClassVar = "stopped_at"

    agent_name: str
    """Name of the agent."""
    status: str
    """State in its life cycle, such as `idle` or `stopped`."""
    task: str
    """Description of the agent's work."""
    capabilities: list[str]
    """Names of what the agent can do."""
    task_id: str | None
    """Task of the hub for which the agent was started and with which it ends. Null: none."""
    started_at: Moment
    """Time at which the agent joined."""
    updated_at: Moment
    """Time of the newest change of the agent's status or capabilities."""
    stopped_at: Moment | None
    """Time at which the agent stopped. Null: it takes part."""
    stopped_why: str | None
    """Reason for the stop. Null: none was given, or the agent takes part."""

    @property
    def is_live(self) -> bool:
        """True if the participant has not stopped."""
        return self.status != STOPPED

    @property
    def lists(self) -> tuple[str, ...]:
        """The list of the participants that have stopped, or of those that have not."""
        return (STOPPED if self.status == STOPPED else PRESENT,)


class AgentKeyRow(Row, frozen=True, gc=False):
    """A row of `registry_keys`: a public key of a participant, an agent with its own keys."""

    VIEW: ClassVar = REGISTRY_KEYS
    KEY: ClassVar = ("agent_name", "key_id")
    ORDER: ClassVar = "registered_at"

    agent_name: str
    """Name of the participant."""
    key_id: str
    """Id of the key: the first 16 hex digits of the SHA-256 of its DER form."""
    public_key: str
    """Public key as PEM."""
    status: str
    """`active` or `removed`."""
    registered_at: Moment
    """Time at which the key was registered."""
    valid_until: Moment | None
    """End of the key's validity, set when a newer key is registered. Null: no newer key."""
    removed_at: Moment | None
    """Time at which the key was removed. Null: it was not."""

    @property
    def is_live(self) -> bool:
        """True if the key was not removed."""
        return self.removed_at is None

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists of the active keys of the agent, and of the active keys with this id."""
        return () if self.removed_at is not None else (list_of_agent(self.agent_name), list_of_key(self.key_id))


class AgentJoined(AgentRequest):
    """Body of `agent.joined`: the agent becomes a participant, with its first public key and a mailbox."""

    TYPE: ClassVar = AGENT_JOINED

    task: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)]
    capabilities: Capabilities
    public_key: PublicKey
    task_id: Name | None = None


class AgentKeyRegistered(AgentRequest):
    """Body of `agent.key_registered`: the participant gets a new public key.

    Its earlier keys remain valid for at most `overlap_ms` milliseconds.
    """

    TYPE: ClassVar = AGENT_KEY_REGISTERED

    public_key: PublicKey
    overlap_ms: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_MS)]


class AgentKeyRemoved(AgentRequest):
    """Body of `agent.key_removed`: the participant's key with the id `key_id` is no longer valid."""

    TYPE: ClassVar = AGENT_KEY_REMOVED

    key_id: KeyId


class AgentUpdated(AgentRequest):
    """Body of `agent.updated`: the participant has a new status or new capabilities. `None` means unchanged."""

    TYPE: ClassVar = AGENT_UPDATED

    status: Literal["idle", "working", "blocked"] | None = None
    capabilities: Capabilities | None = None


class AgentStopped(AgentRequest):
    """Body of `agent.stopped`: the agent is no longer a participant, and its keys are no longer valid."""

    TYPE: ClassVar = AGENT_STOPPED

    reason: Note = ""


class AgentCalled(AgentBody):
    """Body of `agent.called`: the agent called an MCP tool that changes something, with a signed request.

    `signature` is the SHA-256 of the signature's bytes in hex. The record lets the fold recognise a signature
    that is used a second time.
    """

    TYPE: ClassVar = AGENT_CALLED
    IDENTITY: ClassVar = ("{origin}", "{agent_name}", "{signature}")

    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
    tool: Name


PARTICIPANT_MODELS: Final = models_of(
    AgentJoined, AgentKeyRegistered, AgentKeyRemoved, AgentUpdated, AgentStopped, AgentCalled
)
