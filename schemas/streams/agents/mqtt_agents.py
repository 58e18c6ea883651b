"""The records about agents that take part over MQTT (JE-26): wire models, and functions that build the records.

They share the stream `agent/<name>` with the agent's definition and its keys. The value of `agent.said` is the
payload that the agent published on its outbox, byte for byte. The doors make the other records.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Unpack

from pydantic import BaseModel, ConfigDict, Field

from schemas.fold.view_rows import Moment, Row
from schemas.keys.sealing import Keyring, mqtt_agent_secret_purpose
from schemas.streams.agents.agent_registry import AgentRequest
from schemas.streams.principal.principals import FreeName
from schemas.wire.ids import AGENT, is_name, stream_key
from schemas.wire.record import JSON_CONTENT, Origin, OutgoingRecord
from schemas.wire.signing import SIGNATURE_FIELD, Signer
from schemas.wire.strict_json import INT_MAX, canonical
from schemas.wire.wire_body import Name

AGENT_MQTT_REGISTERED: Final = "agent.mqtt_registered"
AGENT_MQTT_REMOVED: Final = "agent.mqtt_removed"
AGENT_SAID: Final = "agent.said"
REGISTRY_MQTT_AGENTS: Final = "registry_mqtt_agents"

# The values of an agent's status.
REGISTERED: Final = "registered"
REMOVED: Final = "removed"
TEXT: Final = "text/plain"
_KIND_LIMIT: Final = 128
_USER: Final = "agent."


class MqttAgentRow(Row, frozen=True, gc=False):
    """A row of `registry_mqtt_agents` (JE-26): an agent that takes part over MQTT.

    `messages` is the number of its messages that were accepted since `registered_at`. `last_seq` is the highest
    seq among them.
    """

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
    """Time of the removal."""
    last_seq: int
    """Highest seq among its accepted messages."""
    messages: int
    """Number of its messages that were accepted since `registered_at`."""
    last_said_at: Moment | None
    """Time of its newest accepted message."""


class AgentMqttRegistered(AgentRequest):
    """Body of `agent.mqtt_registered`: the agent takes part over MQTT.

    `sealed_secret` is sealed for the purpose `mqtt-agent-secret/<agent_name>`.
    """

    agent_name: FreeName
    sealed_secret: str


class AgentMqttRemoved(AgentRequest):
    """Body of `agent.mqtt_removed`: the agent's secret is no longer valid."""


class AgentSaid(BaseModel):
    """Payload that an agent publishes on its outbox: a message to one recipient.

    Unknown keys are kept and are part of the signed bytes. `schema_version` may be omitted; the fold checks it
    before this model. `body` may be any JSON. This model does not require a signature; the fold rejects a
    missing one as `bad_signature`.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    schema_version: Literal[1] = 1
    message_id: Name
    to: Name
    kind: Annotated[str, Field(min_length=1, max_length=_KIND_LIMIT)]
    body: Any
    priority: Literal["low", "normal", "high"] = "normal"
    in_reply_to: Name | None = None
    thread: Name | None = None
    seq: Annotated[int, Field(ge=1, le=INT_MAX)]


MQTT_AGENT_MODELS: Final[dict[str, type[BaseModel]]] = {
    AGENT_MQTT_REGISTERED: AgentMqttRegistered,
    AGENT_MQTT_REMOVED: AgentMqttRemoved,
    AGENT_SAID: AgentSaid,
}


def mqtt_user(agent_name: str) -> str:
    """Return the MQTT user name of an agent. It differs from that of every job, which is 8 hex digits."""
    return f"{_USER}{agent_name}"


def agent_of_user(user: str) -> str | None:
    """Return the name of the agent with this MQTT user name, or `None` if the user is no agent."""
    name = user.removeprefix(_USER)
    return name if user.startswith(_USER) and is_name(name) else None


def registration_record(
    agent_name: str, secret: str, keyring: Keyring, *, request_id: str, **origin: Unpack[Origin]
) -> OutgoingRecord:
    """Return the record that registers an agent for MQTT, with its secret sealed by `keyring`.

    Raises:
        pydantic.ValidationError: a name is invalid, or `agent_name` is reserved.
    """
    body = AgentMqttRegistered(
        agent_name=agent_name,
        request_id=request_id,
        sealed_secret=keyring.seal(secret.encode("utf-8"), mqtt_agent_secret_purpose(agent_name)),
    )
    return _record(AGENT_MQTT_REGISTERED, body, origin)


def removal_record(agent_name: str, *, request_id: str, **origin: Unpack[Origin]) -> OutgoingRecord:
    """Return the record that removes an agent from MQTT.

    Raises:
        pydantic.ValidationError: a name is invalid.
    """
    body = AgentMqttRemoved(agent_name=agent_name, request_id=request_id)
    return _record(AGENT_MQTT_REMOVED, body, origin)


def said_bytes(said: dict[str, Any]) -> bytes:
    """Return the signed bytes of a payload: its canonical JSON without `hmac_sig`."""
    return canonical({key: value for key, value in said.items() if key != SIGNATURE_FIELD})


def sign_said(said: dict[str, Any], secret: str) -> dict[str, Any]:
    """Return a copy of a payload with its signature in `hmac_sig`, which replaces an existing one."""
    return {**said, SIGNATURE_FIELD: Signer(secret).hexdigest(said_bytes(said))}


def body_text(body: Any) -> tuple[str, str]:
    """Return a body as the mailbox stores it, and its content type.

    A string is stored unchanged as plain text, any other value as canonical JSON.
    """
    return (body, TEXT) if isinstance(body, str) else (canonical(body).decode("utf-8"), JSON_CONTENT)


def _record(record_type: str, body: AgentRequest, origin: Origin) -> OutgoingRecord:
    stream = stream_key(AGENT, body.agent_name)
    return body.record(record_type, stream, body.agent_name, body.request_id, **origin)
