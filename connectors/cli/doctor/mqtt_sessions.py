"""Checks of `trunkline doctor` on messages that the MQTT broker drops, and on client ids that it hands over."""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import Final

from connectors.cli.doctor.findings import START, Checks, Finding, ok, warn
from connectors.plumbing.mqtt_link.broker_settings import DELEGATOR, OPERATOR, role_mqtt
from connectors.plumbing.mqtt_link.payloads import dropped_messages
from schemas.settings.settings import Settings
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_connection import MqttConnection

CHECKS = Checks()
_WAIT_S: Final = 1.0


@CHECKS.add("mqtt_queue")
def check_queue(settings: Settings) -> Finding:
    """Check that the MQTT broker has dropped no message since its start. Dropped ones are a warning.

    A broker that does not publish the figure is no fault: it is then unknown.
    """
    try:
        dropped = dropped_messages(role_mqtt(settings, OPERATOR), _WAIT_S)
    except BackboneUnreachable:
        return warn("the MQTT broker does not answer", START)
    if dropped is None:
        return ok("unknown: the MQTT broker does not publish how many messages it has dropped")
    if not dropped:
        return ok("the MQTT broker has dropped no message since its start")
    return warn(
        f"the MQTT broker has dropped {dropped} messages since its start, after their PUBACK: a queue was full",
        "trunkline logs mosquitto names the client that was away: start it. Publishers that wait for receipts "
        "send again, others have lost events",
    )


@CHECKS.add("client_ids")
def check_client_ids(settings: Settings) -> Finding:
    """Check whether the MQTT broker lets one account take over the client id of another one.

    It tries that with an id of its own, so no other connection is disturbed. A broker that does is no fault,
    because nobody can guess the ids of the bridge and of the agents. Without two accounts it is not tried.
    """
    first, second = (
        role_mqtt(settings, role).model_copy(update={"socket_dir": None}) for role in (DELEGATOR, OPERATOR)
    )
    if first.username == second.username:
        return ok("not tried: the settings have one account for the broker; Trunkline's own ids are secret")
    probe = f"trunkline-doctor-{secrets.token_hex(16)}"
    try:
        with closing(MqttConnection(first, client_id=probe)) as victim:
            victim.open()
            with closing(MqttConnection(second, client_id=probe)) as other:
                other.open()
                is_taken = victim.lost.wait(_WAIT_S)
    except BackboneUnreachable:
        return warn("the MQTT broker does not answer", START)
    if not is_taken:
        return ok("the MQTT broker binds client ids to accounts")
    return ok(
        "the MQTT broker hands a client id over to any account; those of Trunkline's sessions are secret, and "
        "mqtt.user_is_client_id binds all"
    )
