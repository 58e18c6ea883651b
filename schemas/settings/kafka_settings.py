"""The settings section `kafka`: addresses, topic, login and TLS of Kafka, and checks of the login."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, SecretStr, model_validator

from schemas.settings.sections import Section
from schemas.settings.setting_types import HttpAddress, Servers
from trunkline_agent.private_files import PrivateFileError, read_private

USERNAME: Final = "trunkline"
OAUTHBEARER: Final = "OAUTHBEARER"
# Spark's consumers get both in a quoted string: no quotes, no backslashes, only printable characters.
_TEXT: Final = re.compile(r"[ !#-\[\]-~]+").fullmatch
_UNESCAPED: Final = re.compile(r"[A-Za-z0-9._~-]+").fullmatch


def check_client(name: str, text: str) -> None:
    """Raise ValueError if an id or secret for a token server has characters that clients send differently.

    RFC 6749 (2.3.1) says to encode them. Kafka's clients in C and Java send them as they are.
    """
    if not _UNESCAPED(text):
        raise ValueError(
            f"{name} must consist of letters, digits and - . _ ~ with {OAUTHBEARER}: Kafka's clients send "
            "other characters in different ways"
        )


def default_password_file(data_path: Path) -> Path:
    """Return the path of the password file that `./trunkline up` creates for the stack's own Kafka.

    The path is `keys/kafka.password` below `data_path`, the absolute data directory. The file may not exist.
    """
    return data_path / "keys" / "kafka.password"


def check_text(name: str, value: str) -> None:
    """Check that `value` can be used as a Kafka user name or password.

    `name` is the setting or file that has the value.

    Raises:
        ValueError: `value` is empty, or contains a quote, a backslash or a character that is not printable
            ASCII. The message begins with `name` and does not quote the value.
    """
    if _TEXT(value) is None:
        raise ValueError(f"{name}: only printable ASCII without quotes and backslashes is allowed")


def read_password(path: Path) -> str:
    """Read Kafka's password from a file and return it without white space at its ends.

    Raises:
        ValueError: the file is missing, unreadable, readable by other users, or its content cannot be used as a
            password. The message names the file and says how to fix it. It never quotes the content.
    """
    try:
        found = read_private(path).decode("ascii").strip()
    except PrivateFileError as error:
        raise ValueError(str(error)) from None
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing. For the stack's own Kafka ./trunkline up makes it; for another Kafka set its "
            "login (docs/how-to/use_your_own_kafka_and_spark.md), or kafka.security_protocol to PLAINTEXT if it"
            " has none"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {type(error).__name__}") from None
    check_text(str(path), found)
    return found


def missing_login(protocol: str, certfile: Path | None) -> str | None:
    """Return a warning if clients reach Kafka without a login, or None if they log in.

    The fold trusts the log, so any client that can append to it can act as operator.

    Args:
        protocol: the setting `kafka.security_protocol`. The SASL protocols have a login.
        certfile: the setting `kafka.ssl_certfile`. With `SSL`, a client certificate is the login.
    """
    if protocol.startswith("SASL") or (protocol == "SSL" and certfile is not None):
        return None
    return (
        f"kafka.security_protocol is {protocol}: Kafka asks for no login, so whoever reaches it can read, "
        "append and delete records, and become operator"
    )


class KafkaSettings(Section):
    """The Kafka that stores the log.

    `partitions` and `epoch` are stored in the log itself, and every program checks them. A program reads the
    password from `password_file` when it connects, unless `sasl_password` is set.
    """

    bootstrap_servers: Servers = "127.0.0.1:19092"
    """Addresses of the brokers, HOST:PORT, several by commas."""
    topic: str = "trunk.events"
    """Topic of the log."""
    partitions: int = Field(default=4, ge=1, le=1024)
    """Partitions of the topic. The log stores the number, and a mismatch stops every program."""
    epoch: int = Field(default=1, ge=1)
    """Epoch of the log. The log stores it, and a mismatch stops every program."""
    replication_factor: int = Field(default=1, ge=1)
    """Copies of each partition when the topic is made."""
    min_in_sync_replicas: int | None = Field(default=None, ge=1)
    """Copies that must have a record before Kafka acknowledges it. Unset: one fewer than copies, at least 1."""
    record_limit_bytes: int = Field(default=4 * 1024 * 1024, ge=64 * 1024)
    """Kafka's limit for one record. Must be above `limits.payload_bytes`."""
    delivery_timeout_s: float = Field(default=30.0, gt=0)
    """How long a publisher tries before it reports that Kafka is unreachable."""
    heap_mb: int = Field(default=384, ge=128)
    """Heap of each node of the local stack's Kafka."""
    sync_each_batch: bool = False
    """The local stack's Kafka acknowledges records when its disk has them, not the kernel's memory alone."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "SASL_PLAINTEXT"
    """How clients reach Kafka. `PLAINTEXT` has no login and is unsafe."""
    sasl_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "OAUTHBEARER"] = "SCRAM-SHA-512"
    """How clients log in."""
    sasl_username: str = USERNAME
    """User name of the login, or the client's id at the token server."""
    sasl_password: SecretStr | None = None
    """Password of the login, or the client's secret at the token server. Only from the environment."""
    oauth_token_url: HttpAddress | None = None
    """Where the token server gives tokens for a client's id and secret (RFC 6749, 4.4). For `OAUTHBEARER`."""
    oauth_scope: str = ""
    """Scope of the tokens. Empty: none is asked for."""
    sasl_password_file: Path | None = None
    """File with the password, mode 0600. Unset: `<data_dir>/keys/kafka.password`."""
    ssl_ca_certs: Path | None = None
    """PEM file of the authority that signed Kafka's certificate."""
    ssl_certfile: Path | None = None
    """PEM file with the client's certificate."""
    ssl_keyfile: Path | None = None
    """PEM file with the key of `ssl_certfile`."""
    # Set by `Settings`, the model around this section, which knows the data directory.
    _own_password_file: Path | None = PrivateAttr(default=None)

    @property
    def password_file(self) -> Path | None:
        """The file that has the password of the login.

        It is `sasl_password_file`, or else `keys/kafka.password` below the data directory. None only if this
        section was created outside `Settings` and no file is set.
        """
        return self.sasl_password_file or self._own_password_file

    @property
    def wanted_in_sync_replicas(self) -> int:
        """How many replicas must have a record before Kafka acknowledges it (`min.insync.replicas`).

        It is `min_in_sync_replicas`. If that is unset, it is one fewer than `replication_factor`, at least 1.
        """
        return self.min_in_sync_replicas or max(1, self.replication_factor - 1)

    @model_validator(mode="after")
    def _replicas_suffice(self) -> Self:
        if self.wanted_in_sync_replicas > self.replication_factor:
            raise ValueError(
                f"min_in_sync_replicas is {self.min_in_sync_replicas}, above replication_factor "
                f"{self.replication_factor}: Kafka would refuse every record"
            )
        return self

    @model_validator(mode="after")
    def _has_token_server(self) -> Self:
        if self.sasl_mechanism == OAUTHBEARER and self.oauth_token_url is None:
            raise ValueError(f"oauth_token_url is not set, and sasl_mechanism {OAUTHBEARER} needs it")
        if self.oauth_token_url is not None and "@" in urlsplit(self.oauth_token_url).netloc:
            raise ValueError("oauth_token_url must not contain a user or a password")
        if self.sasl_mechanism == OAUTHBEARER:
            check_client("sasl_username", self.sasl_username)
            if self.sasl_password is not None:
                check_client("sasl_password", self.sasl_password.get_secret_value())
        return self

    @model_validator(mode="after")
    def _login_is_text(self) -> Self:
        check_text("sasl_username", self.sasl_username)
        if self.oauth_scope:
            check_text("oauth_scope", self.oauth_scope)
        if self.sasl_password is not None:
            check_text("sasl_password", self.sasl_password.get_secret_value())
        return self
