"""The login at the local stack's own Kafka: what the settings must say, and the clients' one SCRAM user."""

from __future__ import annotations

import ssl
from typing import Final

from kafka import KafkaAdminClient  # type: ignore[import-untyped]
from kafka.admin import (  # type: ignore[import-untyped]
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kafka.errors import KafkaError  # type: ignore[import-untyped]

from connectors.local_stack.ports import LOOPBACK
from connectors.tls_files import KAFKA, KAFKA_INTERNAL, check_server_key
from schemas.errors import BackboneUnreachable, TrunklineError, UsageError
from schemas.settings import Settings

_PROTOCOLS: Final = ("PLAINTEXT", "SASL_SSL")
_MECHANISM: Final = "SCRAM-SHA-512"
_TIMEOUT_MS: Final = 10_000


def check_local_login(settings: Settings) -> None:
    """Raise UsageError for a way to log in that the stack's own Kafka does not have, and for keys of its that
    others can read.
    """
    kafka = settings.kafka
    if kafka.security_protocol not in _PROTOCOLS:
        raise UsageError(
            f"kafka.security_protocol is {kafka.security_protocol}: the local stack's Kafka has "
            f"{' or '.join(_PROTOCOLS)}"
        )
    if kafka.security_protocol == "PLAINTEXT":
        return
    if kafka.sasl_mechanism != _MECHANISM:
        raise UsageError(f"kafka.sasl_mechanism is {kafka.sasl_mechanism}: the local stack has {_MECHANISM}")
    for name in (KAFKA, KAFKA_INTERNAL):
        file = settings.tls_path / f"{name}.pem"
        if not file.exists():
            raise UsageError(
                f"kafka.security_protocol is set, and {file} is missing: run ./trunkline tls create"
            )
        check_server_key(file)
    if kafka.ssl_ca_certs is None:
        raise UsageError(f"kafka.ssl_ca_certs is not set: set it to {settings.tls_path / 'ca.crt'}")


def ensure_scram_user(settings: Settings, port: int) -> None:
    """Make `kafka.sasl_username` with `kafka.sasl_password`, or give it that password now, and remove all other
    users: what the settings named before opens nothing.

    `port`: the broker's own listener, which its own certificate opens. Kafka's tool would take the password as
    an argument, for every process of the machine to read. Raises TrunklineError.
    """
    kafka, tls = settings.kafka, settings.tls_path
    if kafka.sasl_username is None or kafka.sasl_password is None:
        raise UsageError("kafka.sasl_username or kafka.sasl_password is not set")
    context = ssl.create_default_context(cafile=str(tls / f"{KAFKA_INTERNAL}.crt"))
    context.load_cert_chain(tls / f"{KAFKA_INTERNAL}.pem")
    wanted = UserScramCredentialUpsertion(
        kafka.sasl_username, ScramMechanism.SCRAM_SHA_512, kafka.sasl_password.get_secret_value()
    )
    try:
        client = KafkaAdminClient(
            bootstrap_servers=f"{LOOPBACK}:{port}",
            client_id="trunkline-login",
            security_protocol="SSL",
            ssl_context=context,
            bootstrap_timeout_ms=_TIMEOUT_MS,
            request_timeout_ms=_TIMEOUT_MS,
        )
        try:
            errors = client.alter_user_scram_credentials([wanted])
            # Not in one request: a broker whose last user goes while another one comes may forget both.
            others = _others(client, kafka.sasl_username)
            errors |= client.alter_user_scram_credentials(others) if others else {}
        finally:
            client.close()
    except KafkaError as problem:
        raise BackboneUnreachable(f"Kafka's own listener on {LOOPBACK}:{port}: {problem}") from problem
    for user, error in errors.items():
        if error is not None:
            what = "take the user" if user == kafka.sasl_username else "remove the user"
            raise TrunklineError(f"Kafka did not {what} {user!r}: {error}")


def _others(client: KafkaAdminClient, username: str) -> list[UserScramCredentialDeletion]:
    """What removes all but this user as it logs in now."""
    return [
        UserScramCredentialDeletion(user, found["mechanism"])
        for user, described in client.describe_user_scram_credentials().items()
        for found in described["credential_infos"]
        if (user, found["mechanism"]) != (username, ScramMechanism.SCRAM_SHA_512)
    ]
