"""Connection options of Kafka clients: address, TLS and login for kafka-python, librdkafka and Spark.

Spark's options contain no password. They contain the name of a variable, which Kafka's own client reads in the
process that opens the connection.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError
from kafka.errors import (  # type: ignore[import-untyped]
    AuthorizationError,
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaTimeoutError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)
from kafka.net.sasl.oauth import AbstractTokenProvider  # type: ignore[import-untyped]

from schemas.settings.kafka_settings import OAUTHBEARER, check_client, read_password
from schemas.settings.settings import ENV_PREFIX, KafkaSettings, SettingsError, check_key_file
from trunkline_agent.errors import BackboneUnreachable

PASSWORD_VARIABLE: Final = f"{ENV_PREFIX}KAFKA__SASL_PASSWORD"
_OAUTH: Final = "org.apache.kafka.common.security.oauthbearer"
_MODULES: Final = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
    OAUTHBEARER: f"{_OAUTH}.OAuthBearerLoginModule",
}
SILENT: Final = logging.Logger("librdkafka", logging.CRITICAL + 1)
"""A logger for librdkafka, which would else write to stderr. Its callbacks report the same errors."""
# kafka-python warns of credentials in clear text without TLS. SCRAM sends none. The stack uses PLAIN at its own
# broker's listener for itself alone, with a password that is valid for one start.
logging.getLogger("kafka.net.sasl").setLevel(logging.ERROR)
RIGHTS_PAGE: Final = "docs/how-to/use_your_own_kafka_and_spark.md"
"""The page that has the rights of Kafka's user."""
_UNSAID: Final = (None, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
_LOGIN_ERRORS: Final = (SaslAuthenticationFailedError, UnsupportedSaslMechanismError, IllegalSaslStateError)

_TOKEN_WAIT_S: Final = 10.0
# A token is asked for anew after this part of its time, as the other clients do.
_TOKEN_KEPT: Final = 0.8
# A server may leave out how long its token lasts (RFC 6749, 5.1).
_TOKEN_LASTS_S: Final = 300


def kafka_context(kafka: KafkaSettings) -> ssl.SSLContext | None:
    """Return the TLS context for connections to Kafka, or None if the settings say to connect without TLS.

    Raises:
        SettingsError: a certificate or key cannot be read, or other users can read the key's file.
    """
    if not kafka.security_protocol.endswith("SSL"):
        return None
    _check_key(kafka)
    return _context(kafka.ssl_ca_certs, kafka.ssl_certfile, kafka.ssl_keyfile)


def kafka_password(kafka: KafkaSettings) -> str:
    """Return the password with which clients log in at Kafka.

    It is the setting `sasl_password`, or else the content of `password_file`.

    Raises:
        SettingsError: there is neither, or the file is missing, readable by other users or has no valid
            password.
    """
    if kafka.sasl_password is not None:
        return kafka.sasl_password.get_secret_value()
    if kafka.password_file is None:
        raise SettingsError(
            f"kafka.sasl_password and kafka.sasl_password_file are missing, and kafka.security_protocol "
            f"{kafka.security_protocol} needs one of them"
        )
    try:
        password = read_password(kafka.password_file)
        if kafka.sasl_mechanism == OAUTHBEARER:
            check_client("the password", password)
        return password
    except ValueError as error:
        raise SettingsError(f"kafka.sasl_password_file: {error}") from None


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Return keyword arguments for a kafka-python client: address, TLS and login, with the password.

    Raises:
        SettingsError: a certificate, a key or the password is missing, invalid or readable by other users.
    """
    found: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "security_protocol": kafka.security_protocol,
    }
    context = kafka_context(kafka)
    if context is not None:
        found["ssl_context"] = context
    if kafka.security_protocol.startswith("SASL"):
        found |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": kafka_password(kafka),
        }
        if kafka.sasl_mechanism == OAUTHBEARER:
            found["sasl_oauth_token_provider"] = oauth_tokens(kafka, kafka_password(kafka))
    return found


def librdkafka_options(kafka: KafkaSettings) -> dict[str, str]:
    """Return the configuration of a confluent-kafka client (librdkafka): address, TLS and login.

    It contains the password. Options without a value are left out.

    Raises:
        SettingsError: a certificate, a key or the password is missing, invalid or readable by other users.
    """
    kafka_context(kafka)  # reports faults of the certificates, which librdkafka would not explain
    found: dict[str, object] = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "security.protocol": kafka.security_protocol,
        "ssl.ca.location": kafka.ssl_ca_certs,
        "ssl.certificate.location": kafka.ssl_certfile,
        "ssl.key.location": kafka.ssl_keyfile or kafka.ssl_certfile,
    }
    if kafka.security_protocol.startswith("SASL"):
        found |= {
            "sasl.mechanism": kafka.sasl_mechanism,
            "sasl.username": kafka.sasl_username,
            "sasl.password": kafka_password(kafka),
        }
        if kafka.sasl_mechanism == OAUTHBEARER:
            found |= {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.token.endpoint.url": kafka.oauth_token_url,
                "sasl.oauthbearer.client.id": kafka.sasl_username,
                "sasl.oauthbearer.client.secret": kafka_password(kafka),
                "sasl.oauthbearer.scope": kafka.oauth_scope or None,
            }
    return {name: str(value) for name, value in found.items() if value is not None}


def spark_security(kafka: KafkaSettings) -> dict[str, str]:
    """Return the options of Spark's Kafka source for TLS and login. Empty if Kafka has neither.

    They do not contain the password: Spark's JVM reads it from the environment variable
    `TRUNKLINE__KAFKA__SASL_PASSWORD`.

    Raises:
        SettingsError: this variable does not have the password, or a certificate or key cannot be used.
    """
    if kafka.security_protocol == "PLAINTEXT":
        return {}
    found: dict[str, str] = {"kafka.security.protocol": kafka.security_protocol}
    if kafka.security_protocol.endswith("SSL"):
        found |= _java_certificates(kafka)
    if kafka.security_protocol.startswith("SASL"):
        if os.environ.get(PASSWORD_VARIABLE) != kafka_password(kafka):
            raise SettingsError(
                f"kafka.sasl_password: Spark takes it from the environment alone; set {PASSWORD_VARIABLE} for "
                "the driver and for every executor"
            )
        found |= {
            "kafka.sasl.mechanism": kafka.sasl_mechanism,
            "kafka.config.providers": "env",
            "kafka.config.providers.env.class": "org.apache.kafka.common.config.provider.EnvVarConfigProvider",
            "kafka.config.providers.env.param.allowlist.pattern": PASSWORD_VARIABLE,
            "kafka.sasl.jaas.config": f"{_MODULES[kafka.sasl_mechanism]} required {_jaas_login(kafka)};",
        }
        if kafka.sasl_mechanism == OAUTHBEARER:
            found |= {
                "kafka.sasl.login.callback.handler.class": f"{_OAUTH}.OAuthBearerLoginCallbackHandler",
                "kafka.sasl.oauthbearer.token.endpoint.url": str(kafka.oauth_token_url),
            }
    return found


def _jaas_login(kafka: KafkaSettings) -> str:
    """Return who logs in, as Java's login modules read it. The password stays in the environment."""
    secret = f"${{env:{PASSWORD_VARIABLE}}}"
    if kafka.sasl_mechanism != OAUTHBEARER:
        return f'username="{kafka.sasl_username}" password="{secret}"'
    scope = f' scope="{kafka.oauth_scope}"' if kafka.oauth_scope else ""
    return f'clientId="{kafka.sasl_username}" clientSecret="{secret}"{scope}'


def tls_trouble(kafka: KafkaSettings, error: ssl.SSLError) -> str:
    """Return a phrase for an error message that explains why a TLS handshake with Kafka failed.

    The phrase gives the likely cause and the setting to check. `error` is the error of the handshake.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({error.verify_message}): kafka.ssl_ca_certs must be the "
            "authority that signed it, and kafka.bootstrap_servers a name in it"
        )
    if "alert" in (error.reason or "").lower():
        return f"it ended TLS ({error.reason}): perhaps it wants kafka.ssl_certfile and kafka.ssl_keyfile"
    return f"no TLS ({error.reason or error}): is kafka.security_protocol {kafka.security_protocol} right?"


def unreachable(kafka: KafkaSettings, error: BaseException, where: str = "") -> BackboneUnreachable:
    """Return an exception to raise when a Kafka client failed, with a message that names the setting to check.

    If the cause is unclear, this function may connect to Kafka (up to 2 s) to find out whether it speaks TLS.

    Args:
        kafka: the settings of Kafka.
        error: the error that the client raised.
        where: text after Kafka's address in the message, such as `, topic 'trunk.events'`. Empty by default.
    """
    if isinstance(error, AuthorizationError):
        what = type(error).__name__.removesuffix("AuthorizationFailedError").lower()
        return BackboneUnreachable(
            f"Kafka at {kafka.bootstrap_servers}{where}: its user lacks a right on the {what} ({RIGHTS_PAGE})"
        )
    said = f"Kafka at {kafka.bootstrap_servers}{where}: {error}"
    # kafka-python does not report why it could not begin. A server did answer: `reach_kafka` ran before.
    is_unsaid = isinstance(error, KafkaTimeoutError | KafkaConnectionError)
    if isinstance(error, _LOGIN_ERRORS) or (is_unsaid and kafka.security_protocol.startswith("SASL")):
        token = " oauth_token_url," if kafka.sasl_mechanism == OAUTHBEARER else ""
        said += (
            f"; does it refuse the login? Look at kafka.sasl_username,{token} sasl_password and sasl_mechanism"
        )
    elif is_unsaid and not kafka.security_protocol.endswith("SSL") and _speaks_tls(kafka):
        said += f"; it speaks TLS, and kafka.security_protocol is {kafka.security_protocol}"
    elif is_unsaid and kafka.security_protocol == "PLAINTEXT":
        said += "; does it ask for a login? kafka.security_protocol is PLAINTEXT"
    elif is_unsaid:
        said += f"; is kafka.security_protocol {kafka.security_protocol} what it wants?"
    return BackboneUnreachable(said)


def librdkafka_unreachable(kafka: KafkaSettings, error: KafkaError | None, where: str) -> BackboneUnreachable:
    """Return an exception to raise when a confluent-kafka client (librdkafka) failed or got no answer.

    The message names Kafka's address, the error and the setting to check. If the cause is unclear, this
    function may connect to Kafka (up to 2 s) to find out whether it speaks TLS.

    Args:
        kafka: the settings of Kafka.
        error: the error that librdkafka reported. `None` means that Kafka did not answer in time.
        where: text after Kafka's address in the message, such as `, topic 'trunk.events'`. It may be empty.
    """
    code, said = (None, "no answer") if error is None else (error.code(), error.str())
    if code == KafkaError._AUTHENTICATION:
        return unreachable(kafka, SaslAuthenticationFailedError(said), where)
    # librdkafka reports a refused login. With a login, no further guess is therefore needed.
    is_unsaid = code in _UNSAID and not kafka.security_protocol.startswith("SASL")
    return unreachable(kafka, KafkaTimeoutError(said) if is_unsaid else RuntimeError(said), where)


def bootstrap_addresses(kafka: KafkaSettings) -> list[tuple[str, int]]:
    """Return the host and port of each server in the setting `kafka.bootstrap_servers`.

    An IPv6 address is returned without brackets.
    """
    parts = (server.strip().rpartition(":") for server in kafka.bootstrap_servers.split(","))
    return [(host.strip("[]"), int(port)) for host, _, port in parts]


def _speaks_tls(kafka: KafkaSettings) -> bool:
    """Return whether the first server answers a TLS handshake, even if the handshake then fails."""
    address = bootstrap_addresses(kafka)[0]
    context = ssl.create_default_context()
    try:
        with socket.create_connection(address, timeout=2.0) as plain:
            context.wrap_socket(plain, server_hostname=address[0]).close()
    except ssl.SSLCertVerificationError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _check_key(kafka: KafkaSettings) -> None:
    if kafka.ssl_certfile is not None:
        check_key_file("kafka.ssl_", kafka.ssl_certfile, kafka.ssl_keyfile)


def _java_certificates(kafka: KafkaSettings) -> dict[str, str]:
    _check_key(kafka)
    found = {}
    if kafka.ssl_ca_certs is not None:
        found = {
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": str(kafka.ssl_ca_certs.absolute()),
        }
    if kafka.ssl_certfile is not None:
        # Java needs key and certificate in one file, as `tls create` writes them to kafka.pem.
        if kafka.ssl_keyfile not in (None, kafka.ssl_certfile):
            raise SettingsError(
                "kafka.ssl_keyfile: for Spark kafka.ssl_certfile must hold the key (PKCS#8), too; unset this"
            )
        found |= {
            "kafka.ssl.keystore.type": "PEM",
            "kafka.ssl.keystore.location": str(kafka.ssl_certfile.absolute()),
        }
    return found


@lru_cache(maxsize=32)
def _context(ca_certs: Path | None, certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if ca_certs is None else str(ca_certs))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certfile is not None:
            context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"kafka.ssl_ca_certs, kafka.ssl_certfile or kafka.ssl_keyfile: {error}") from error
    return context


class OAuthTokens(AbstractTokenProvider):  # type: ignore[misc]
    """Gives the token of a client, and asks the token server for a new one in time. Thread-safe.

    Args:
        kafka: The settings of the login.
        secret: The client's secret.
    """

    def __init__(self, kafka: KafkaSettings, secret: str) -> None:
        self._url = str(kafka.oauth_token_url)
        self._login = (kafka.sasl_username, secret)
        scope = {"scope": kafka.oauth_scope} if kafka.oauth_scope else {}
        self._body = {"grant_type": "client_credentials"} | scope
        self._asking = threading.Lock()
        self._token, self._until, self._ends = "", 0.0, 0.0

    def token(self) -> str:
        """Return a token that is valid.

        Raises:
            BackboneUnreachable: The token server does not answer or gives none, and the token before has ended.
                The message has no secret.
        """
        with self._asking:
            # This clock goes on while the machine sleeps, and nobody sets it.
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if now >= self._until:
                try:
                    self._token, lasts_s = self._asked()
                except BackboneUnreachable:
                    if now >= self._ends:
                        raise
                    # The token is still valid, and each try may take long.
                    self._until = min(now + _TOKEN_WAIT_S, self._ends)
                else:
                    self._until, self._ends = now + _TOKEN_KEPT * lasts_s, now + lasts_s
            return self._token

    def _asked(self) -> tuple[str, float]:
        import httpx2  # a late import, because few need it

        try:
            trusted = ssl.create_default_context()
            answer = httpx2.post(
                self._url, data=self._body, auth=self._login, timeout=_TOKEN_WAIT_S, verify=trusted
            )
            if answer.status_code != httpx2.codes.OK:
                raise ValueError(f"it answers {answer.status_code} {answer.reason_phrase}")
            found = answer.json()
            return str(found["access_token"]), float(found.get("expires_in", _TOKEN_LASTS_S))
        except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BackboneUnreachable(
                f"the token server at {self._url} gives no token ({type(error).__name__}: {error}): look at "
                "kafka.oauth_token_url, sasl_username and sasl_password"
            ) from None


@cache
def oauth_tokens(kafka: KafkaSettings, secret: str) -> OAuthTokens:
    """Return the tokens of a login, the same object for the same login."""
    return OAuthTokens(kafka, secret)
