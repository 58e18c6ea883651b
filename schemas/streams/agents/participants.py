"""The records about participants (AM-03 to AM-06): agents that take part with a key of their own.

They share the stream `agent/<name>` with the agent's definition. Wire models and how a door makes the records.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from schemas.fold.life_cycles import STOPPED
from schemas.fold.view_rows import Moment, Row
from schemas.wire.ids import AGENT, stream_key
from schemas.wire.record import OutgoingRecord, content_id
from schemas.wire.strict_json import canonical
from schemas.wire.wire_body import (
    OVERLAP_LIMIT_MS,
    TASK_TEXT_LIMIT,
    Capabilities,
    Name,
    Note,
    Printable,
    WireBody,
)

AGENT_JOINED: Final = "agent.joined"
AGENT_KEY_REGISTERED: Final = "agent.key_registered"
AGENT_KEY_REMOVED: Final = "agent.key_removed"
AGENT_UPDATED: Final = "agent.updated"
AGENT_STOPPED: Final = "agent.stopped"
AGENT_CALLED: Final = "agent.called"
REGISTRY_PARTICIPANTS: Final = "registry_participants"
REGISTRY_KEYS: Final = "registry_keys"

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
KEY_ID_DIGITS: Final = 16
# So long a signature of a mutating call is remembered, by the log's clock (AM-02): longer than it can be valid.
CALLS_KEPT_S: Final = 600
_BEGIN: Final = "-----BEGIN PUBLIC KEY-----\n"
_END: Final = "\n-----END PUBLIC KEY-----\n"


def _der(pem: str) -> bytes:
    """What a PEM of a public key holds. Raises ValueError."""
    if not pem.startswith(_BEGIN) or not pem.endswith(_END):
        raise ValueError("not a public key in PEM form")
    lines = pem[len(_BEGIN) : -len(_END)].split("\n")
    if any(len(line) != 64 for line in lines[:-1]) or not 0 < len(lines[-1]) <= 64:
        raise ValueError("not a public key in PEM form: lines have 64 characters")
    return base64.b64decode("".join(lines), validate=True)


def _pem(text: str) -> str:
    _der(text)
    return text


def key_id_of(public_key: str) -> str:
    """What a key is shown by: the first 16 hex digits of SHA-256 over its DER form (SubjectPublicKeyInfo).

    Raises ValueError for what is no PEM of a public key.
    """
    return hashlib.sha256(_der(public_key)).hexdigest()[:KEY_ID_DIGITS]


PublicKey = Annotated[str, Field(max_length=KEY_LIMIT), AfterValidator(_pem)]
"""PEM of a SubjectPublicKeyInfo (RFC 7468, section 13). What kind of key, the door has looked at."""
KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}\z")]
"""What a key is shown by."""


class ParticipantRow(Row, frozen=True, gc=False):
    """A row of `registry_participants` (AM-06): an agent that takes part with a key of its own. `task_id`: the
    hub's task that it was spawned for, and ends with.
    """

    VIEW: ClassVar = REGISTRY_PARTICIPANTS
    KEY: ClassVar = ("agent_name",)

    agent_name: str
    """Name of the agent."""
    status: str
    """State in its life cycle, such as `idle` or `stopped`."""
    task: str
    """Description of its work."""
    capabilities: list[str]
    """Names of what the agent can do."""
    task_id: str | None
    """Task of the hub for which the agent was started and with which it ends."""
    started_at: Moment
    """Time at which the agent joined."""
    updated_at: Moment
    """Time of the newest change of its status or capabilities."""
    stopped_at: Moment | None
    """Time at which the agent stopped."""
    stopped_why: str | None
    """Reason for the stop."""


class AgentKeyRow(Row, frozen=True, gc=False):
    """A row of `registry_keys`: a participant's public key (PEM). `valid_until`: set when a newer one came."""

    VIEW: ClassVar = REGISTRY_KEYS
    KEY: ClassVar = ("agent_name", "key_id")

    agent_name: str
    """Name of the participant."""
    key_id: str
    """Id of the key."""
    public_key: str
    """Public key as PEM."""
    status: str
    """`active` or `removed`."""
    registered_at: Moment
    """Time at which the key was registered."""
    valid_until: Moment | None
    """End of the key's validity, set when a newer key is registered."""
    removed_at: Moment | None
    """Time at which the key was removed."""


class _ParticipantBody(WireBody):
    agent_name: Name


class _RequestBody(_ParticipantBody):
    request_id: Name


class AgentJoined(_RequestBody):
    """Body of `agent.joined`: the agent takes part from now on, with its first key, and has a mailbox."""

    task: Annotated[Printable, Field(max_length=TASK_TEXT_LIMIT)]
    capabilities: Capabilities
    public_key: PublicKey
    task_id: Name | None = None


class AgentKeyRegistered(_RequestBody):
    """Body of `agent.key_registered`: a further key; those before it are good for `overlap_ms` more."""

    public_key: PublicKey
    overlap_ms: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_MS)]


class AgentKeyRemoved(_RequestBody):
    """Body of `agent.key_removed`."""

    key_id: KeyId


class AgentUpdated(_RequestBody):
    """Body of `agent.updated`: what the agent says of itself; what it leaves out stays."""

    status: Literal["idle", "working", "blocked"] | None = None
    capabilities: Capabilities | None = None


class AgentStopped(_RequestBody):
    """Body of `agent.stopped`: it takes part no more, and its keys are worth nothing."""

    reason: Note = ""


class AgentCalled(_ParticipantBody):
    """Body of `agent.called`: a call that changes something was signed; the signature is good once.

    `signature`: SHA-256 of its bytes, in hex.
    """

    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
    tool: Name


PARTICIPANT_MODELS: Final[dict[str, type[_ParticipantBody]]] = {
    AGENT_JOINED: AgentJoined,
    AGENT_KEY_REGISTERED: AgentKeyRegistered,
    AGENT_KEY_REMOVED: AgentKeyRemoved,
    AGENT_UPDATED: AgentUpdated,
    AGENT_STOPPED: AgentStopped,
    AGENT_CALLED: AgentCalled,
}
_TYPES: Final = {model: name for name, model in PARTICIPANT_MODELS.items()}


def participant_record(
    body: _ParticipantBody, *, door: str, principal: str, ce_id: str | None = None
) -> OutgoingRecord:
    """The record of one of the bodies above. The same request by the same principal has the same `ce_id`, also
    with other content, so that the fold can tell that it is a conflict.
    """
    record_type = _TYPES[type(body)]
    asked = body.request_id if isinstance(body, _RequestBody) else getattr(body, "signature", "")
    identity = (record_type, f"{door}/{principal}", body.agent_name, asked)
    return OutgoingRecord(
        stream=stream_key(AGENT, body.agent_name),
        ce_id=ce_id or content_id(*(part.encode() for part in identity)),
        door=door,
        principal=principal,
        type=record_type,
        value=canonical(body.model_dump(mode="json")),
    )
