"""The operations that give agents access to their mailboxes over MQTT (JE-26): register, remove, list."""

from __future__ import annotations

import uuid
from typing import Any, Final

from pydantic import ConfigDict

from connectors.hub.engine.family import Family, LongAnswer, Steps, page_by_name
from connectors.hub.engine.operation import Answer, Asked
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError, row_as_json
from connectors.hub.serving.identities import TOKEN_WINDOW_S, url_safe
from connectors.hub.serving.models import AnswerBody, NoFields, PageAnswer, PageFilter, row_answer
from connectors.hub.serving.policy import Action
from connectors.operations.agents.agent_operations import AGENTS, AgentPath
from connectors.operations.rules.owners import check_name_is_free
from schemas.effects.recipients import NO_LIMITS
from schemas.keys.sealing import Keyring, mqtt_agent_secret_purpose, sealed_by
from schemas.streams.agents.mqtt_agents import (
    AgentMqttRegistered,
    AgentMqttRemoved,
    MqttAgentRow,
    registered_by_request,
    sealed_secret_of,
)
from schemas.streams.control.limits import LimitRow
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.agent_message import mqtt_user
from trunkline_agent.wire.ids import AGENT, stream_key
from trunkline_agent.wire.mqtt_password import mqtt_password
from trunkline_agent.wire.signing import new_secret
from trunkline_agent.wire.topics import inbox_topic, outbox_topic
from trunkline_agent.wire.verdicts import DUPLICATE, SEQ_CONFLICT

OF_AGENTS: Final = Family(f"{AGENTS.path}/{{name}}/mqtt")
MQTT_AGENTS: Final = Family("/api/hub/mqtt-agents")


class MqttGrantAnswer(AnswerBody):
    """The credentials of an agent for MQTT, and its topics.

    A retry with the same idempotency key within a day gets the same secret and password.
    """

    agent_name: str
    """Name of the agent."""
    secret: str
    """Secret with which the agent signs its messages."""
    username: str
    """User name at the MQTT broker."""
    password: str
    """Password at the MQTT broker."""
    prefix: str
    """Common prefix of all agents' topics."""
    inbox: str
    """Topic that the agent reads."""
    outbox: str
    """Topic that the agent publishes to."""


MqttAgentAnswer: Final = row_answer("MqttAgentAnswer", MqttAgentRow)


class ListedMqttAgent(MqttAgentAnswer):  # type: ignore[valid-type, misc]
    """The columns of an agent's row, and the rates that apply to it. The MQTT bridge enforces the rates."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    unconfirmed: int
    """How often messages were published again that the agent did not confirm. 0: fewer than three times."""

    messages_per_minute: int | None
    """Messages that the agent may publish in a minute. Null: not limited."""
    bytes_per_minute: int | None
    """Bytes in bodies of messages that it may publish in a minute. Null: not limited."""


class MqttAgentsAnswer(PageAnswer):
    """The agents that are or were registered for MQTT."""

    agents: list[ListedMqttAgent]
    """Agents, sorted by name."""


@OF_AGENTS.post("", Action.PARTICIPANT_ADD, MqttGrantAnswer, STATUS=201)
async def register_mqtt_agent(hub: Hub, asked: Asked, name: AgentPath, body: NoFields | None = None) -> Answer:
    """Give an agent or a principal access to its mailbox over MQTT.

    The MQTT bridge publishes the mailbox's messages on the agent's inbox topic. The bridge posts the
    messages that the agent publishes on its outbox topic. The answer contains the agent's secret, MQTT
    login and topics. The answer is 409 when the agent has access already, and 403 for the name of a
    listener.
    """
    check_name_is_free(hub, name, "name", asked.principal, f"POST {OF_AGENTS.path}")
    # A repeated request must have the same bytes, so it uses the master key of the first one.
    sealed = sealed_secret_of(hub.live_view.entries(stream_key(AGENT, name)), asked.request_id)
    keyring = hub.keyring if sealed is None else hub.keyring.under(sealed_by(sealed))
    secret = new_secret() if asked.key is None else _derived_secret(keyring, asked.made, name)
    record = AgentMqttRegistered(
        sealed_secret=keyring.seal(secret.encode(), mqtt_agent_secret_purpose(name)),
        agent_name=name,
        request_id=asked.request_id,
    ).record(**asked.origin)
    settled = await hub.appender.settle_accepted(record)
    if settled.verdict == DUPLICATE:
        _check_repeatable(hub, name, asked.request_id)
    await hub.tell_registered(mqtt_user(name))
    return Answer(_grant(hub, name, secret), settled.verdict)


@OF_AGENTS.post("/remove", Action.PARTICIPANT_STOP, MqttAgentAnswer, COMMAND="agents mqtt-remove")
def remove_mqtt_agent(hub: Hub, asked: Asked, name: AgentPath, body: NoFields | None = None) -> Steps:
    """End an agent's access over MQTT: its secret and its MQTT login become invalid.

    The messages in its mailbox stay. The answer is 404 for an agent that never had access, and 409 for one
    that no longer has it.
    """
    yield AgentMqttRemoved(agent_name=name, request_id=asked.request_id).record(**asked.origin)
    return row_as_json(_row(hub, name))


@MQTT_AGENTS.get("", Action.AGENT_READ, MqttAgentsAnswer)
def list_mqtt_agents(hub: Hub, asked: Asked, wanted: PageFilter) -> LongAnswer:
    """List the agents that are registered for MQTT, sorted by name, including removed ones.

    An answer has `limits.answer_bytes` at most.
    """
    # The bridge asks each second, and usually there are no limits.
    of = hub.limits.of if hub.live_view.live(LimitRow) else lambda _: NO_LIMITS
    again = hub.unconfirmed_inboxes

    def shown(row: MqttAgentRow) -> dict[str, Any]:
        name = row.agent_name
        return {**row_as_json(row), "unconfirmed": again.get(name, 0), **of(name).rates}

    rows = hub.live_view.live(MqttAgentRow)
    return page_by_name(hub, "agents", rows, lambda row: row.agent_name, wanted, shown)


def _grant(hub: Hub, name: str, secret: str) -> dict[str, Any]:
    prefix, user = hub.settings.mqtt.agents_prefix, mqtt_user(name)
    return {
        "agent_name": name,
        "secret": secret,
        "username": user,
        "password": mqtt_password(secret, user),
        "prefix": prefix,
        "inbox": inbox_topic(prefix, name),
        "outbox": outbox_topic(prefix, name),
    }


def _derived_secret(keyring: Keyring, made: uuid.UUID, name: str) -> str:
    """Return the secret that follows from a request, so that it need not be stored."""
    return url_safe(keyring.derive(f"mqtt-agent/{name}/{made}"))


def _row(hub: Hub, name: str) -> MqttAgentRow:
    row = hub.live_view.get(MqttAgentRow, name)
    if row is None:
        raise TrunklineError(f"agent {name} was settled and has no row")
    return row


def _check_repeatable(hub: Hub, name: str, request_id: str) -> None:
    """Raise ApiError (409) when the secret of a repeated request is revoked, or too old to repeat."""
    if registered_by_request(hub.live_view.entries(stream_key(AGENT, name))) != request_id:
        raise ApiError(409, SEQ_CONFLICT, "this agent was registered by the same request, and removed since")
    if hub.log_clock.now_s() - _row(hub, name).registered_at / 1e6 > TOKEN_WINDOW_S:
        raise ApiError(409, SEQ_CONFLICT, "this agent was registered by the same request, too long ago")
