"""The request and answer bodies of participants (AM-03, AM-06, AM-09)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from connectors.hub.serving.models import (
    OVERLAP_LIMIT_S,
    WHOLE,
    AnswerBody,
    NamedThing,
    PageAnswer,
    PageFilter,
    RequestBody,
)
from connectors.operations.rules.message_models import JsonContent, SentMessage
from schemas.streams.agents.participants import KEY_LIMIT
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Capabilities, Note, Printable

Status = Literal["initializing", "idle", "working", "blocked", "stopped"]


class SpawnRequest(RequestBody):
    """An agent to start."""

    task: Annotated[Printable, Field(min_length=1, max_length=TASK_TEXT_LIMIT)]
    """Description of the agent's work."""
    agent_name: NamedThing | None = None
    """Name of the agent. Null: the gateway chooses one."""
    capabilities: Capabilities = Field([])
    """Names of what the agent can do."""


class JoinRequest(RequestBody):
    """An agent that runs elsewhere and keeps its own private key."""

    agent_name: NamedThing
    """Name of the agent."""
    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    """Public RSA key of the agent, in PEM."""
    task: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)] = ""
    """Description of the agent's work."""
    capabilities: Capabilities = Field([])
    """Names of what the agent can do."""


class KeyRequest(RequestBody):
    """An additional key of an agent."""

    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    """Public RSA key of the agent, in PEM."""
    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S), WHOLE] = 3600
    """How long the agent's present keys stay valid, in seconds."""


class AgentStopRequest(RequestBody):
    """The reason for stopping an agent."""

    reason: Note = ""
    """Reason for the stop."""


class BroadcastRequest(SentMessage, JsonContent):
    """A message to all participants."""

    type: Annotated[Printable, Field(min_length=1, max_length=128)]
    """Kind of the message, a word that the sender chooses."""
    payload: Any = None
    """Content of the message: any JSON."""


class ParticipantFilter(PageFilter):
    """The participants to list."""

    status: Status | None = None
    """State of the participants. Without it: all that have not stopped."""
    capability: NamedThing | None = None
    """Name of something that the participants can do. Without it: any."""


class KeyAnswer(AnswerBody):
    """A public key of an agent that is valid, or was valid until recently."""

    key_id: str
    """Id of the key: the first 16 hex digits of its hash."""
    registered_at: AwareDatetime
    """Time of the registration."""
    valid_until: AwareDatetime | None
    """Time until which the key is valid. Null: without an end."""


class Participant(AnswerBody):
    """A participant, without its keys."""

    id: str
    """Name of the agent."""
    task: str
    """Description of the agent's work."""
    status: Status
    """State in the agent's life cycle."""
    capabilities: list[str]
    """Names of what the agent can do."""
    task_id: str | None
    """Task for which the gateway spawned the agent. Null: none."""
    started_at: AwareDatetime
    """Time at which the agent joined."""
    updated_at: AwareDatetime
    """Time of the newest change of the agent's status or capabilities."""
    stopped_at: AwareDatetime | None
    """Time at which the agent stopped. Null: it takes part."""
    stopped_why: str | None
    """Reason for the stop. Null: none was given, or the agent takes part."""


class ParticipantAnswer(Participant):
    """A participant with its keys."""

    keys: list[KeyAnswer]
    """Public keys of the agent, oldest first."""


class ParticipantsAnswer(PageAnswer):
    """The participants that match every filter."""

    participants: list[ParticipantAnswer]
    """Participants, sorted by name."""


class ReplayedAnswer(AnswerBody):
    """A dead message that was posted again."""

    replayed: bool
    """Always true."""
    message_id: str
    """Id of the new message."""


class BroadcastAnswer(AnswerBody):
    """A broadcast: one message in each recipient's mailbox."""

    broadcast_id: str
    """Id that all copies of the broadcast share."""
    recipients: int
    """Number of mailboxes that got the message."""
    full: int
    """Number of mailboxes that got none, because they are full."""


class ClearedAnswer(AnswerBody):
    """A mailbox that was cleared."""

    cleared: int
    """Number of messages that were removed."""
