"""The request and answer bodies of participants (AM-03, AM-06, AM-09)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from connectors.gateway.web.models import OVERLAP_LIMIT_S, AnswerBody, NamedThing, QueryFilter, RequestBody
from schemas.streams.agents.participants import KEY_LIMIT
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Capabilities, Note, Printable

Status = Literal["initializing", "idle", "working", "blocked", "stopped"]


class SpawnRequest(RequestBody):
    """An agent to start. Without a name the gateway chooses one."""

    task: Annotated[Printable, Field(min_length=1, max_length=TASK_TEXT_LIMIT)]
    agent_name: NamedThing | None = None
    capabilities: Capabilities = Field([])


class JoinRequest(RequestBody):
    """An agent that runs elsewhere and keeps its own private key. `public_key`: RSA, in PEM."""

    agent_name: NamedThing
    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    task: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)] = ""
    capabilities: Capabilities = Field([])


class KeyRequest(RequestBody):
    """An additional key of an agent. Its present keys stay valid for `overlap_s` seconds."""

    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S)] = 3600


class StopRequest(RequestBody):
    """The reason for stopping an agent."""

    reason: Note = ""


class BroadcastRequest(RequestBody):
    """A message to all participants. `payload`: any JSON."""

    type: Annotated[Printable, Field(min_length=1, max_length=128)]
    payload: Any = None


class ParticipantFilter(QueryFilter):
    """The participants to list; without `status` all that have not stopped."""

    status: Status | None = None
    capability: NamedThing | None = None


class KeyAnswer(AnswerBody):
    """A public key of an agent that is valid, or was valid until recently."""

    key_id: str
    registered_at: AwareDatetime
    valid_until: AwareDatetime | None


class Participant(AnswerBody):
    """A participant, without its keys."""

    id: str
    task: str
    status: Status
    capabilities: list[str]
    task_id: str | None
    started_at: AwareDatetime
    updated_at: AwareDatetime
    stopped_at: AwareDatetime | None
    stopped_why: str | None


class ParticipantAnswer(Participant):
    """A participant. `task_id`: the task for which the gateway spawned it."""

    keys: list[KeyAnswer]


class ParticipantsAnswer(AnswerBody):
    """Participants, sorted by name."""

    participants: list[ParticipantAnswer]


class ReplayedAnswer(AnswerBody):
    """A dead message that was posted again. `message_id`: the id of the new message."""

    replayed: bool
    message_id: str


class BroadcastAnswer(AnswerBody):
    """A broadcast: one message in each of `recipients` mailboxes."""

    broadcast_id: str
    recipients: int


class ClearedAnswer(AnswerBody):
    """The number of messages that were removed from a mailbox."""

    cleared: int
