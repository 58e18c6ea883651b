"""Agents that are connected over MQTT (JE-26): the bodies of their records, their row, and their fold.

The records share the stream `agent/<name>` with the agent's definition and its keys. The value of `agent.said`
and of `agent.confirmed` is the payload that the agent published on its outbox, byte for byte. The doors make
the other records. The check and the signature of these payloads are in `trunkline_agent.wire.agent_message`.

The state is the entry `mqtt`, and older requests and seqs in `mqtt/requests/...` and `mqtt/seqs/...`
(`schemas.fold.memories`). It remains after the agent is removed. The agent may then be registered again,
with a new secret, and its seqs start again at 1.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.memories import RequestMemory, SeqChunk, SeqMemory, forget_seqs
from schemas.fold.request_fold import RequestFold, Requests
from schemas.fold.settled import Change, Outcome, accepted, changed, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.fold.view_rows import Moment, Row, row_maker
from schemas.keys.sealing import Keyring, mqtt_agent_secret_purpose
from schemas.streams.agents.agent_registry import AgentRequest
from schemas.streams.mailboxes.message import DurationSeconds, check_times, with_message_fields
from schemas.streams.principal.principals import FreeName
from schemas.wire.record import JSON_CONTENT
from schemas.wire.wire_body import Name, models_of
from trunkline_agent.wire.agent_message import CONFIRMS_MOST, KIND_LIMIT, said_bytes
from trunkline_agent.wire.signing import SIGNATURE_FIELD
from trunkline_agent.wire.strict_json import INT_MAX, canonical
from trunkline_agent.wire.unsafe_text import carries_token
from trunkline_agent.wire.verdicts import (
    AFTER_TERMINAL,
    BAD_SIGNATURE,
    ILLEGAL_TRANSITION,
    SECRET_IN_EVENT,
    UNKNOWN_STREAM,
)

AGENT_MQTT_REGISTERED: Final = "agent.mqtt_registered"
AGENT_MQTT_REMOVED: Final = "agent.mqtt_removed"
AGENT_SAID: Final = "agent.said"
AGENT_CONFIRMED: Final = "agent.confirmed"
REGISTRY_MQTT_AGENTS: Final = "registry_mqtt_agents"

# The values of an agent's status.
REGISTERED: Final = "registered"
REMOVED: Final = "removed"
TEXT: Final = "text/plain"


class MqttAgentRow(Row, frozen=True, gc=False):
    """A row of `registry_mqtt_agents`: an agent that is registered for MQTT (JE-26)."""

    VIEW: ClassVar = REGISTRY_MQTT_AGENTS
    KEY: ClassVar = ("agent_name",)

    agent_name: str
    """Name of the agent."""
    status: str
    """`registered` or `removed`."""
    registered_by: str
    """Principal that registered the agent."""
    registered_at: Moment
    """Time of the registration."""
    removed_at: Moment | None
    """Time at which the registration was removed. Null: it is valid."""
    last_seq: int
    """Highest seq among the agent's messages that were accepted since `registered_at`."""
    messages: int
    """Number of the agent's messages that were accepted since `registered_at`."""
    last_said_at: Moment | None
    """Time of the agent's newest accepted message. Null: none was accepted."""


class AgentMqttRegistered(AgentRequest):
    """Body of `agent.mqtt_registered`: the agent may log in at the MQTT broker and publish messages.

    `sealed_secret` is the secret with which it signs them, sealed for `mqtt-agent-secret/<agent_name>`.
    """

    TYPE: ClassVar = AGENT_MQTT_REGISTERED

    agent_name: FreeName
    sealed_secret: str


class AgentMqttRemoved(AgentRequest):
    """Body of `agent.mqtt_removed`: the registration for MQTT ends, and the secret is no longer valid."""

    TYPE: ClassVar = AGENT_MQTT_REMOVED


@with_message_fields()
class AgentSaid(BaseModel):
    """Body of `agent.said`: the payload that an agent publishes on its MQTT outbox, a message to one recipient.

    `body` may be any JSON. Unknown keys are kept and are part of the signed bytes. `schema_version` may be
    omitted; the fold checks it before this model. This model does not require the signature `hmac_sig`, because
    the fold rejects a missing one as `bad_signature`.

    `expires_in_s` and `deliver_after_s` are times in seconds from the posting of the message to its recipient.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    schema_version: Literal[1] = 1
    message_id: Name
    to: Name
    kind: Annotated[str, Field(min_length=1, max_length=KIND_LIMIT)]
    body: Any
    priority: Literal["low", "normal", "high"] = "normal"
    expires_in_s: DurationSeconds | None = None
    deliver_after_s: DurationSeconds | None = None
    seq: Annotated[int, Field(ge=1, le=INT_MAX)]

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        check_times(self.deliver_after_s, self.expires_in_s)
        return self


class AgentConfirmed(BaseModel):
    """Body of `agent.confirmed`: the payload with which an agent confirms that it has these messages.

    `confirms` has the ids of messages that came on its inbox. The reactor claims them in the agent's mailbox.
    Unknown keys, `schema_version` and the signature are as in `agent.said`.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    schema_version: Literal[1] = 1
    confirms: Annotated[list[Name], Field(min_length=1, max_length=CONFIRMS_MOST)]


MQTT_AGENT_MODELS: Final[dict[str, type[BaseModel]]] = {
    **models_of(AgentMqttRegistered, AgentMqttRemoved),
    AGENT_SAID: AgentSaid,
    AGENT_CONFIRMED: AgentConfirmed,
}


def body_text(body: Any) -> tuple[str, str]:
    """Return the text and the content type with which the mailbox stores the `body` of an agent's message.

    A string is stored unchanged as `text/plain`, any other JSON value as canonical JSON.
    """
    return (body, TEXT) if isinstance(body, str) else (canonical(body).decode("utf-8"), JSON_CONTENT)


ENTRY_VERSION: Final = 1


class MqttAgentEntry(msgspec.Struct, array_like=True, gc=False):
    """The stream state of an agent that is registered for MQTT.

    It has the fields of the agent's row in `registry_mqtt_agents`, the sealed secret, and memories of accepted
    requests and seqs. `request_id` is the request that registered the agent. Times are in microseconds since
    1970 UTC.
    """

    version: int
    sealed_secret: str
    request_id: str
    registered_by: str
    registered_at: int
    requests: RequestMemory
    seqs: SeqMemory
    removed_at: int | None = None
    messages: int = 0
    last_said_at: int | None = None

    @property
    def status(self) -> str:
        """The status of the agent: `registered`, or `removed` if its registration for MQTT was removed."""
        return REGISTERED if self.removed_at is None else REMOVED


_UNKNOWN: Final = "no agent of this name is registered for MQTT"
_ENTRY: Final = StructEntries("mqtt", MqttAgentEntry)
_SEQS: Final = StructEntries("mqtt/seqs/", SeqChunk)
_row: Final = row_maker(MqttAgentRow, MqttAgentEntry)


def settle_mqtt_agent(given: FoldInput) -> Outcome:
    """Settle a record about an agent on MQTT: update the stream state, return verdict and changed rows.

    The record registers the agent, removes it, or is a payload that the agent published: a message
    (`agent.said`) or the confirmation of received ones (`agent.confirmed`). A payload is accepted only with a
    valid signature by the agent's secret. `settle_agent` calls this function with a checked body. The changes
    of the stream state, `given.entries`, count only if the record is accepted.
    """
    if given.type in (AGENT_SAID, AGENT_CONFIRMED):
        return _published(given, _ENTRY.read(given.entries))
    return _REGISTRATION.settle(given)


def _registered(given: FoldInput, known: MqttAgentEntry | None) -> MqttAgentEntry | Outcome:
    if known is not None and known.status == REGISTERED:
        return rejected(ILLEGAL_TRANSITION, "the agent is registered for MQTT already", known.status)
    forget_seqs(given.entries, _SEQS)
    return MqttAgentEntry(
        version=ENTRY_VERSION,
        sealed_secret=given.body["sealed_secret"],
        request_id=given.body["request_id"],
        registered_by=given.sender,
        registered_at=given.now_us,
        requests=RequestMemory() if known is None else known.requests,
        seqs=SeqMemory(),
    )


def _removed(given: FoldInput, known: MqttAgentEntry) -> MqttAgentEntry | Outcome:
    if known.status == REMOVED:
        return rejected(AFTER_TERMINAL, "the agent is not registered for MQTT any more", known.status)
    known.removed_at = given.now_us
    return known


def _changes(given: FoldInput, agent: MqttAgentEntry) -> tuple[Change, ...]:
    row = _row(agent, agent_name=given.name, status=agent.status, last_seq=agent.seqs.last)
    return (changed(row),)


_REGISTRATION: Final = RequestFold(
    _ENTRY,
    {AGENT_MQTT_REGISTERED: _registered, AGENT_MQTT_REMOVED: _removed},
    begins=(AGENT_MQTT_REGISTERED,),
    unknown=_UNKNOWN,
    changes=_changes,
    requests=Requests("mqtt/requests", is_inside=True),
)


def _published(given: FoldInput, known: MqttAgentEntry | None) -> Outcome:
    if known is None:
        return rejected(UNKNOWN_STREAM, _UNKNOWN)
    said, status = given.body, known.status
    signature = said.get(SIGNATURE_FIELD)
    signer = given.keyring.signer(known.sealed_secret, mqtt_agent_secret_purpose(given.name))
    if not signer.verifies(said_bytes(said), signature):
        return rejected(BAD_SIGNATURE, "hmac_sig is missing or does not fit the agent's secret", status)
    if carries_token(said):
        return rejected(SECRET_IN_EVENT, "data.auth_token must never be sent", status)
    if given.type == AGENT_CONFIRMED:
        # It has no seq and changes no state here: to confirm a message again has no effect.
        if status == REMOVED:
            return rejected(AFTER_TERMINAL, "the agent is not registered for MQTT any more", status)
        return accepted(status)
    seq = said["seq"]
    # The signature is a keyed hash of the canonical content, so its first 16 bytes serve as the digest.
    digest = bytes.fromhex(str(signature)[:32])
    repeated = known.seqs.repeated(seq, digest, given.entries, _SEQS, status)
    if repeated is not None:
        return repeated
    if status == REMOVED:
        return rejected(AFTER_TERMINAL, "the agent is not registered for MQTT any more", status)
    late = seq < known.seqs.last
    known.seqs.add(seq, digest, given.entries, _SEQS)
    known.messages += 1
    known.last_said_at = given.now_us
    _ENTRY.write(given.entries, known)
    return accepted(status, _changes(given, known), late=late)


def mqtt_agent_secret(name: str, entries: Entries, keyring: Keyring) -> str | None:
    """Return the secret with which an agent on MQTT signs its messages, or `None` if it is not registered now.

    Args:
        name: the name of the agent.
        entries: the entries of the stream `agent/<name>`.
        keyring: the master keys that open the sealed secret.

    Raises:
        UnsealError: no master key of `keyring` opens the sealed secret.
    """
    agent = _ENTRY.read(entries)
    if agent is None or agent.status != REGISTERED:
        return None
    return keyring.open(agent.sealed_secret, mqtt_agent_secret_purpose(name)).decode("utf-8")


def sealed_secret_of(entries: Entries, request_id: str) -> str | None:
    """Return an agent's sealed secret if the request `request_id` was the last to register the agent for MQTT.

    The gateway calls this function to seal the secret of a repeated registration under the same master key.
    Returns `None` if another request registered the agent last, or none did. The secret is also returned if the
    registration was removed later. `entries` are those of the stream `agent/<name>`.
    """
    agent = _ENTRY.read(entries)
    return agent.sealed_secret if agent is not None and agent.request_id == request_id else None


def registered_by_request(entries: Entries) -> str | None:
    """Return the id of the request that registered the agent for MQTT, or `None` if it is not registered now.

    The gateway calls this function for a repeated registration. If another id is returned, the registration was
    removed or replaced since. `entries` are those of the stream `agent/<name>`.
    """
    agent = _ENTRY.read(entries)
    return agent.request_id if agent is not None and agent.status == REGISTERED else None
