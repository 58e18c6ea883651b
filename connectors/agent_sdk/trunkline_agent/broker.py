"""The broker that an MQTT client connects to: its address, TLS files, login and times. Imports no MQTT library.

The number of connections on the port of the stack's own Mosquitto is limited, and strangers can use it up. The
broker therefore also listens on a Unix socket in a folder that only its own user may enter. Programs of that
user connect through it, so they always get in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Protocol

from trunkline_agent.credentials import MqttAccess
from trunkline_agent.wire.agent_message import mqtt_user
from trunkline_agent.wire.mqtt_password import job_user, mqtt_password

JOBS_PREFIX: Final = "python/mqtt/jobs"
AGENTS_PREFIX: Final = "python/mqtt/agents"
LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class HiddenText(Protocol):
    """A password that does not show itself, such as pydantic's `SecretStr`."""

    def get_secret_value(self) -> str:
        """Return the password in clear text."""
        ...


class BrokerAccess(Protocol):
    """The attributes by which a client knows a broker.

    `Broker` has them, and so has the product's `MqttSettings`.
    """

    @property
    def host(self) -> str:
        """The broker's host name or address."""
        ...

    @property
    def port(self) -> int:
        """Its TCP port."""
        ...

    @property
    def tls(self) -> bool:
        """True if clients use TLS."""
        ...

    @property
    def ca_certs(self) -> Path | None:
        """The PEM file of the authority that signed the broker's certificate; None: the system's."""
        ...

    @property
    def certfile(self) -> Path | None:
        """The PEM file with the client's certificate; None: it has none."""
        ...

    @property
    def keyfile(self) -> Path | None:
        """The PEM file with its private key; None: it is in `certfile`."""
        ...

    @property
    def username(self) -> str | None:
        """The user name; None: a job or agent logs in with the account that its secret gives."""
        ...

    @property
    def password(self) -> str | HiddenText | None:
        """The user's password."""
        ...

    @property
    def topic_prefix(self) -> str:
        """The topic below which jobs publish their events."""
        ...

    @property
    def connect_timeout_s(self) -> float:
        """The longest time to wait for a connection and its login."""
        ...

    @property
    def puback_timeout_s(self) -> float:
        """The longest time to wait for the broker's acknowledgement."""
        ...

    @property
    def receipt_timeout_s(self) -> float:
        """The longest time to wait for Trunkline's receipt."""
        ...

    @property
    def publish_attempts(self) -> int:
        """The number of connections to try."""
        ...

    @property
    def backoff_base_s(self) -> float:
        """The pause after the first failed attempt. It doubles with each further one."""
        ...

    @property
    def backoff_max_s(self) -> float:
        """The longest pause between two attempts."""
        ...

    @property
    def session_expiry_s(self) -> int:
        """How long the broker keeps the messages for an agent that is not connected."""
        ...

    @property
    def socket_dir(self) -> Path | None:
        """The folder of the broker's private Unix socket; None: connect over TCP."""
        ...


@dataclass(frozen=True, slots=True)
class Broker:
    """An MQTT broker, the login there, and the times that a client waits. `BrokerAccess` describes the fields.

    The password is in no `repr`.
    """

    host: str = "127.0.0.1"
    port: int = 1883
    tls: bool = False
    ca_certs: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    topic_prefix: str = JOBS_PREFIX
    connect_timeout_s: float = 10.0
    puback_timeout_s: float = 5.0
    receipt_timeout_s: float = 10.0
    publish_attempts: int = 3
    backoff_base_s: float = 0.5
    backoff_max_s: float = 8.0
    session_expiry_s: int = 7 * 24 * 3600
    socket_dir: Path | None = None


def as_broker(access: BrokerAccess, **changes: Any) -> Broker:
    """Return a `Broker` with the attributes of `access`, of which `changes` replace some."""
    values = {one.name: getattr(access, one.name) for one in fields(Broker)}
    return Broker(**{**values, "password": clear_password(access), **changes})


def mqtt_broker(access: MqttAccess, ca_certs: str | os.PathLike[str] | None) -> Broker:
    """Return the broker that an agent's credentials name. `ca_certs` is the authority of its TLS, or None."""
    return Broker(access.host, access.port, access.tls, None if ca_certs is None else Path(ca_certs))


def job_broker(access: BrokerAccess, job_id: str, secret: str) -> Broker:
    """Return a broker with the login for the publisher of a job's events.

    If `access` has a user name, its login is kept. Otherwise user name and password are those of the job's own
    account. They are derived from `job_id` and from `secret`, the job's secret in clear text.
    """
    if access.username is not None:
        return as_broker(access)
    user = job_user(job_id, secret)
    return as_broker(access, username=user, password=mqtt_password(secret, user))


def agent_broker(access: BrokerAccess, name: str, secret: str) -> Broker:
    """Return a broker with the login of an agent that has a mailbox over MQTT.

    If `access` has a user name, its login is kept. Otherwise user name and password are those of the agent's
    own account. They are derived from `name` and from `secret`, the agent's secret in clear text.
    """
    if access.username is not None:
        return as_broker(access)
    user = mqtt_user(name)
    return as_broker(access, username=user, password=mqtt_password(secret, user))


def clear_password(access: BrokerAccess) -> str | None:
    """Return the password of the login in clear text, None if there is none."""
    found = access.password
    return found if found is None or isinstance(found, str) else found.get_secret_value()


def broker_name(access: BrokerAccess) -> str:
    """Return `host:port` of the broker, for log lines and error texts."""
    return f"{access.host}:{access.port}"


def socket_name(port: int) -> str:
    """Return the file name of the private Unix socket of the broker on this port, such as `1883.sock`."""
    return f"{port}.sock"


def private_socket(access: BrokerAccess) -> Path | None:
    """Return the path of the broker's private Unix socket, None when a client must connect over TCP instead.

    None means that the broker is not the stack's own, does not run, or belongs to another system user.
    """
    if access.socket_dir is None or access.host.lower() not in LOOPBACK_NAMES:
        return None
    path = access.socket_dir / socket_name(access.port)
    return path if os.access(path, os.W_OK) else None
