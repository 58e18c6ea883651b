"""The bodies of the hub's routes for participants (AM-03, AM-06, AM-09), as its OpenAPI page shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from connectors.gateway.web.models import OVERLAP_LIMIT_S, NamedThing
from schemas.streams.agents.participants import KEY_LIMIT
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Capabilities, Note, Printable

Status = Literal["initializing", "idle", "working", "blocked", "stopped"]
_KIND_LIMIT = 128


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SpawnRequest(_Request):
    """An agent to start. Without a name it gets one."""

    task: Annotated[Printable, Field(min_length=1, max_length=TASK_TEXT_LIMIT)]
    agent_name: NamedThing | None = None
    capabilities: Capabilities = []


class JoinRequest(_Request):
    """An agent that runs elsewhere and keeps its private key itself. `public_key`: RSA, in PEM."""

    agent_name: NamedThing
    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    task: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)] = ""
    capabilities: Capabilities = []


class KeyRequest(_Request):
    """A further key of an agent. The ones it has are good for `overlap_s` more."""

    public_key: Annotated[str, Field(max_length=KEY_LIMIT)]
    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S)] = 3600


class StopRequest(_Request):
    """Why an agent is stopped."""

    reason: Note = ""


class BroadcastRequest(_Request):
    """A message to all participants. `payload`: any JSON."""

    type: Annotated[Printable, Field(min_length=1, max_length=_KIND_LIMIT)]
    payload: Any = None


class ParticipantFilter(BaseModel):
    """Which participants to list, by name; without a status all but the stopped ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Status | None = None
    capability: NamedThing | None = None


class KeyAnswer(_Answer):
    """A key that is good, or was until lately."""

    key_id: str
    registered_at: AwareDatetime
    valid_until: AwareDatetime | None


class ParticipantAnswer(_Answer):
    """A participant. `task_id`: the task that it was spawned for."""

    id: str
    task: str
    status: Status
    capabilities: list[str]
    task_id: str | None
    started_at: AwareDatetime
    updated_at: AwareDatetime
    stopped_at: AwareDatetime | None
    stopped_why: str | None
    keys: list[KeyAnswer]


class ParticipantsAnswer(_Answer):
    """Participants by name."""

    participants: list[ParticipantAnswer]


class BroadcastAnswer(_Answer):
    """One message lies in each of so many mailboxes."""

    broadcast_id: str
    recipients: int


class ClearedAnswer(_Answer):
    """So many messages were taken out of a mailbox."""

    cleared: int
