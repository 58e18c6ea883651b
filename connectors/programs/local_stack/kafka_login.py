"""The login at the local stack's Kafka: checks its settings, creates its password and its one SCRAM user."""

from __future__ import annotations

import secrets
import ssl
from dataclasses import dataclass
from typing import Any, Final

from kafka import KafkaAdminClient  # type: ignore[import-untyped]
from kafka.admin import ScramMechanism, UserScramCredentialDeletion, UserScramCredentialUpsertion  # type: ignore[import-untyped]
from kafka.errors import KafkaError  # type: ignore[import-untyped]

from connectors.plumbing.tls_keys.tls_files import KAFKA, KAFKA_INTERNAL, check_server_key
from connectors.programs.local_stack.ports import LOOPBACK
from schemas.log_access.kafka_clients import kafka_password
from schemas.settings.kafka_settings import default_password_file
from schemas.settings.settings import Settings
from trunkline_agent.errors import BackboneUnreachable, TrunklineError, UsageError
from trunkline_agent.private_files import make_first

PLAINTEXT, SASL_PLAINTEXT, SASL_SSL = "PLAINTEXT", "SASL_PLAINTEXT", "SASL_SSL"
_PROTOCOLS: Final = (SASL_PLAINTEXT, SASL_SSL, PLAINTEXT)
_MECHANISM: Final = "SCRAM-SHA-512"
_TIMEOUT_MS: Final = 10_000
_PASSWORD_BYTES: Final = 32
_BROKER: Final = "broker"


def check_local_login(settings: Settings) -> None:
    """Check, before the start, that the stack's Kafka supports the login in the settings.

    Raises:
        UsageError: The protocol or mechanism is not supported, or TLS keys are missing or readable by others.
    """
    kafka = settings.kafka
    if kafka.security_protocol not in _PROTOCOLS:
        raise UsageError(
            f"kafka.security_protocol is {kafka.security_protocol}: the local stack's Kafka supports "
            f"{' or '.join(_PROTOCOLS)}"
        )
    if kafka.security_protocol == PLAINTEXT:
        return
    if kafka.sasl_mechanism != _MECHANISM:
        raise UsageError(f"kafka.sasl_mechanism is {kafka.sasl_mechanism}: the local stack needs {_MECHANISM}")
    if kafka.security_protocol == SASL_PLAINTEXT:
        return
    for name in (KAFKA, KAFKA_INTERNAL):
        file = settings.tls_path / f"{name}.pem"
        if not file.exists():
            raise UsageError(f"kafka.security_protocol {SASL_SSL} needs {file}: run ./trunkline tls create")
        check_server_key(file)
    if kafka.ssl_ca_certs is None:
        raise UsageError(f"kafka.ssl_ca_certs is not set: set it to {settings.tls_path / 'ca.crt'}")


def ensure_password(settings: Settings) -> None:
    """Create the password file of the stack's Kafka with mode 0600, unless it exists.

    If the settings name a password or another file, nothing is created.

    Raises:
        OSError: The file cannot be written.
    """
    kafka = settings.kafka
    file = default_password_file(settings.data_path)
    if kafka.sasl_password is None and kafka.password_file == file and not file.exists():
        make_first(file, f"{secrets.token_urlsafe(_PASSWORD_BYTES)}\n")


@dataclass(frozen=True)
class InternalListener:
    """The port and the password of the Kafka listener that only Kafka and the stack itself use.

    With SASL_PLAINTEXT and one node they are valid for one start of Kafka. With the login method PLAIN, the
    password is sent to any program that listens on the port. So each start has a new port and password.
    Otherwise the password is empty, and both sides have the key pair `kafka-internal`.
    """

    port: int
    password: str


def ensure_scram_user(settings: Settings, listener: InternalListener) -> None:
    """Create the Kafka user `kafka.sasl_username`, or set its password, and remove all other users.

    Kafka must run. The change is made through `listener`, because Kafka's own tool takes the password as an
    argument, which every process of the machine can read.

    Raises:
        BackboneUnreachable: The internal listener does not answer.
        SettingsError: The password cannot be read.
        TrunklineError: Kafka refused a change.
    """
    kafka = settings.kafka
    wanted = UserScramCredentialUpsertion(
        kafka.sasl_username, ScramMechanism.SCRAM_SHA_512, kafka_password(kafka)
    )
    try:
        client = KafkaAdminClient(
            bootstrap_servers=f"{LOOPBACK}:{listener.port}",
            client_id="trunkline-login",
            bootstrap_timeout_ms=_TIMEOUT_MS,
            request_timeout_ms=_TIMEOUT_MS,
            **_broker_security(settings, listener),
        )
        try:
            errors = client.alter_user_scram_credentials([wanted])
            # Two requests: a broker that removes its last user while it adds another may lose both.
            others = _others(client, kafka.sasl_username)
            errors |= client.alter_user_scram_credentials(others) if others else {}
        finally:
            client.close()
    except KafkaError as problem:
        raise BackboneUnreachable(f"Kafka's own listener on {LOOPBACK}:{listener.port}: {problem}") from problem
    for user, error in errors.items():
        if error is not None:
            what = "take the user" if user == kafka.sasl_username else "remove the user"
            raise TrunklineError(f"Kafka did not {what} {user!r}: {error}")


def _broker_security(settings: Settings, listener: InternalListener) -> dict[str, Any]:
    """Return kafka-python's options that open the broker's own listener."""
    if listener.password:
        return {
            "security_protocol": SASL_PLAINTEXT,
            "sasl_mechanism": "PLAIN",
            "sasl_plain_username": _BROKER,
            "sasl_plain_password": listener.password,
        }
    context = ssl.create_default_context(cafile=str(settings.tls_path / f"{KAFKA_INTERNAL}.crt"))
    context.load_cert_chain(settings.tls_path / f"{KAFKA_INTERNAL}.pem")
    return {"security_protocol": "SSL", "ssl_context": context}


def _others(client: KafkaAdminClient, username: str) -> list[UserScramCredentialDeletion]:
    """Return the deletions of all users but this one as it logs in now."""
    return [
        UserScramCredentialDeletion(user, found["mechanism"])
        for user, described in client.describe_user_scram_credentials().items()
        for found in described["credential_infos"]
        if (user, found["mechanism"]) != (username, ScramMechanism.SCRAM_SHA_512)
    ]
