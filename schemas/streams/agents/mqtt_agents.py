"""The records about agents that are connected over MQTT (JE-26): their bodies.

They share the stream `agent/<name>` with the agent's definition and its keys. The value of `agent.said` and of
`agent.confirmed` is the payload that the agent published on its outbox, byte for byte. The doors make the other
records. The check and the signature of these payloads are in `trunkline_agent.wire.agent_message`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.fold.view_rows import Moment, Row
from schemas.streams.agents.agent_registry import AgentRequest
from schemas.streams.mailboxes.message import DurationSeconds, check_times, with_message_fields
from schemas.streams.principal.principals import FreeName
from schemas.wire.record import JSON_CONTENT
from schemas.wire.wire_body import Name, models_of
from trunkline_agent.wire.agent_message import CONFIRMS_MOST, KIND_LIMIT
from trunkline_agent.wire.strict_json import INT_MAX, canonical

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
