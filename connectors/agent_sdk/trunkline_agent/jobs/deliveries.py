"""The ways to send a job's events: chosen by arguments, or by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trunkline_agent.broker import Broker, BrokerAccess, mqtt_broker
from trunkline_agent.credentials import (
    CA_VARIABLE,
    FILE_VARIABLE,
    HUB_URL_VARIABLE,
    Credentials,
    HubAccess,
    MqttAccess,
)
from trunkline_agent.errors import UsageError
from trunkline_agent.outbox.delivery import EventDelivery

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"", "0", "false", "no", "off"})
_BROKER: Final = "MQTT_BROKER"
_MQTT_PORT: Final = 1883


def over_hub(
    job_id: str,
    hub: HubAccess | Credentials,
    ca_certs: str | os.PathLike[str] | None,
    patience_s: float,
) -> EventDelivery:
    """Return the delivery of a job's events over HTTP. See `Job` for the arguments."""
    from trunkline_agent.jobs.http_delivery import HubDelivery

    if isinstance(hub, Credentials):
        ca_certs = ca_certs or hub.ca_certs
        hub = hub.hub_access()
    return HubDelivery(hub, job_id, ca_certs, patience_s)


def over_mqtt(
    job_id: str,
    secret: str,
    mqtt: MqttAccess | BrokerAccess | Credentials,
    ca_certs: str | os.PathLike[str] | None,
) -> EventDelivery:
    """Return the delivery of a job's events over MQTT. See `Job` for the arguments."""
    from trunkline_agent.mqtt.event_delivery import MqttDelivery

    if isinstance(mqtt, Credentials):
        ca_certs = ca_certs or mqtt.ca_certs
        mqtt = mqtt.mqtt_access()
    broker = mqtt_broker(mqtt, ca_certs) if isinstance(mqtt, MqttAccess) else mqtt
    return MqttDelivery(broker, job_id, secret)


def environment_doors(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the argument `hub` or `mqtt` of `Job` that the environment gives, see `Job.from_environment`.

    Raises UsageError if it gives none.
    """
    if variables.get(FILE_VARIABLE) or variables.get(HUB_URL_VARIABLE):
        credentials = Credentials.from_environment(variables)
        if credentials.hub is not None:
            return {"hub": credentials}
        if not variables.get(_BROKER):
            return {"mqtt": credentials}
    if not variables.get(_BROKER):
        raise UsageError(
            f"no way to send events: set {FILE_VARIABLE}, {HUB_URL_VARIABLE} with a token, or {_BROKER}"
        )
    return {"mqtt": environment_broker(variables)}


def environment_broker(variables: Mapping[str, str]) -> Broker:
    """Return the broker of MQTT_BROKER and its companions. Raises UsageError for a value that is not valid."""
    tls = variables.get("MQTT_TLS", "").lower()
    if tls not in _TRUE | _FALSE:
        raise UsageError(f"MQTT_TLS: expected true or false, not {tls!r}")
    port = variables.get("MQTT_PORT") or str(_MQTT_PORT)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise UsageError(f"MQTT_PORT: {port!r} is not a port")
    files: dict[str, Any] = {
        name: Path(variables[f"MQTT_{name.upper()}"])
        for name in ("ca_certs", "certfile", "keyfile")
        if variables.get(f"MQTT_{name.upper()}")
    }
    if "ca_certs" not in files and variables.get(CA_VARIABLE):
        files["ca_certs"] = Path(variables[CA_VARIABLE])
    return Broker(
        variables[_BROKER],
        int(port),
        tls in _TRUE,
        **files,
        username=variables.get("MQTT_USERNAME") or None,
        password=variables.get("MQTT_PASSWORD") or None,
    )
