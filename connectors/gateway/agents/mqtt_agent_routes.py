"""The hub's routes for agents over MQTT (JE-26): register, remove, list."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict

from connectors.gateway.agents.agent_routes import AGENTS, AgentPath
from connectors.gateway.rules.xml_recipients import is_listener
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import asks_for
from connectors.gateway.web.answers import ApiError, json_answer, malformed, refuse_rejected, row_as_json
from connectors.gateway.web.idempotency import TOKEN_WINDOW_S, IdempotencyKey, request_uuid
from connectors.gateway.web.models import ERRORS, MqttAgentAnswer, NoFields
from connectors.gateway.web.policy import Action
from connectors.gateway.web.refusals import DOOR
from connectors.mqtt_link.topics import inbox_topic, outbox_topic
from schemas.errors import TrunklineError
from schemas.fold.view_rows import REGISTRY_MQTT_AGENTS, MqttAgentRow
from schemas.keys.mqtt_password import mqtt_password
from schemas.keys.sealing import Keyring, sealed_by
from schemas.streams.agents.mqtt_agent_fold import registered_by_request, sealed_secret_of
from schemas.streams.agents.mqtt_agents import mqtt_user, registration_record, removal_record
from schemas.streams.principal.principals import RESERVED_PRINCIPALS
from schemas.wire.ids import AGENT, stream_key
from schemas.wire.signing import new_secret
from schemas.wire.verdicts import DUPLICATE, POLICY, SEQ_CONFLICT

MQTT_AGENTS: Final = "/api/hub/mqtt-agents"


class MqttGrantAnswer(BaseModel):
    """What an agent needs to take part over MQTT. Secret and password are told here, and again for a retry with
    the same idempotency key within a day. `prefix`: what all agents' topics begin with.
    """

    model_config = ConfigDict(extra="forbid")

    agent_name: str
    secret: str
    username: str
    password: str
    prefix: str
    inbox: str
    outbox: str


class MqttAgentsAnswer(BaseModel):
    """The agents that are registered for MQTT, by name."""

    model_config = ConfigDict(extra="forbid")

    agents: list[MqttAgentAnswer]  # type: ignore[valid-type]


def add_mqtt_agent_routes(app: FastAPI, hub: Hub) -> None:
    """Add `/api/hub/agents/{name}/mqtt`, the same with `/remove`, and `/api/hub/mqtt-agents`."""

    @app.post(f"{AGENTS}/{{name}}/mqtt", status_code=201, response_model=MqttGrantAnswer, responses=ERRORS)
    @asks_for(Action.PARTICIPANT_ADD)
    async def register_mqtt_agent(
        request: Request, name: AgentPath, body: NoFields | None = None, key: IdempotencyKey = None
    ) -> Response:
        """Give an agent, or a principal, its mailbox over MQTT: what comes for it is published on its inbox,
        what it publishes on its outbox is posted. Its secret is told here.
        """
        if name in RESERVED_PRINCIPALS:
            raise malformed("name: this name is reserved")
        principal = request.state.caller.principal
        if is_listener(hub, name):
            # Its inbox would take what a pump is to handle.
            why = "a listener has this name"
            hub.refusals.record(POLICY, why, principal, f"POST {AGENTS}/{{name}}/mqtt")
            raise ApiError(403, POLICY, why)
        made = request_uuid(principal, key)
        # A request that was made under an earlier master key is the same one under the one of today.
        sealed = sealed_secret_of(hub.live_view.entries(stream_key(AGENT, name)), str(made))
        keyring = hub.keyring if sealed is None else hub.keyring.under(sealed_by(sealed))
        secret = new_secret() if key is None else _derived_secret(keyring, made, name)
        record = registration_record(
            name, secret, keyring, request_id=str(made), door=DOOR, principal=principal
        )
        settled = refuse_rejected(await hub.appender.settle(record))
        if settled.verdict == DUPLICATE:
            _check_retold(hub, name, str(made))
        await hub.tell_registered(mqtt_user(name))
        return json_answer(_grant(hub, name, secret), 201, settled.verdict)

    @app.post(f"{AGENTS}/{{name}}/mqtt/remove", response_model=MqttAgentAnswer, responses=ERRORS)
    @asks_for(Action.PARTICIPANT_STOP)
    async def remove_mqtt_agent(
        request: Request, name: AgentPath, body: NoFields | None = None, key: IdempotencyKey = None
    ) -> Response:
        """End an agent's mailbox over MQTT: its secret is worth nothing any more. What lies in it stays."""
        principal = request.state.caller.principal
        request_id = str(request_uuid(principal, key))
        record = removal_record(name, request_id=request_id, door=DOOR, principal=principal)
        settled = refuse_rejected(await hub.appender.settle(record))
        return json_answer(row_as_json(_row(hub, name)), verdict=settled.verdict)

    @app.get(MQTT_AGENTS, response_model=MqttAgentsAnswer, responses=ERRORS)
    @asks_for(Action.AGENT_READ)
    async def list_mqtt_agents() -> Response:
        """List the agents over MQTT by name, also those that were removed."""
        rows = [row for row in hub.live_view.rows(REGISTRY_MQTT_AGENTS) if isinstance(row, MqttAgentRow)]
        return json_answer({"agents": [row_as_json(row) for row in sorted(rows, key=lambda r: r.agent_name)]})


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
    """The same for the same request, so it need not be kept, and unknown to whoever has no master key."""
    return base64.urlsafe_b64encode(keyring.derive(f"mqtt-agent/{name}/{made}")).decode("ascii").rstrip("=")


def _row(hub: Hub, name: str) -> MqttAgentRow:
    row = hub.live_view.row(REGISTRY_MQTT_AGENTS, name)
    if not isinstance(row, MqttAgentRow):
        raise TrunklineError(f"agent {name} was settled and has no row")
    return row


def _check_retold(hub: Hub, name: str, request_id: str) -> None:
    """Raise ApiError (409) when a secret is not told again: it is not the one that counts, or it is too old."""
    if registered_by_request(hub.live_view.entries(stream_key(AGENT, name))) != request_id:
        raise ApiError(409, SEQ_CONFLICT, "this agent was registered by the same request, and removed since")
    if time.time() - _row(hub, name).registered_at / 1e6 > TOKEN_WINDOW_S:
        raise ApiError(409, SEQ_CONFLICT, "this agent was registered by the same request, too long ago")
