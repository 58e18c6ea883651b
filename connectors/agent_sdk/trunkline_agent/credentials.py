"""The credentials of an agent for each door: read from a file or the environment, and written to a file."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from trunkline_agent.errors import NotFound, UsageError
from trunkline_agent.private_files import read_private
from trunkline_agent.wire.ids import is_name

_T = TypeVar("_T")

SCHEMA_VERSION: Final = 1
FILE_VARIABLE: Final = "TRUNKLINE_CREDENTIALS"
HUB_URL_VARIABLE: Final = "TRUNKLINE_HUB_URL"
TOKEN_VARIABLE: Final = "TRUNKLINE_AGENT_TOKEN"  # noqa: S105  a variable's name
NAME_VARIABLE: Final = "TRUNKLINE_AGENT_NAME"
CA_VARIABLE: Final = "TRUNKLINE_CA_CERTS"
# The agent MCP door: the agent's name, the path of its private key, and the server's address.
AGENT_ID_VARIABLE: Final = "AGENT_ID"
AGENT_KEY_VARIABLE: Final = "AGENT_KEY_PATH"
MCP_URL_VARIABLE: Final = "MCP_SERVER_URL"
_BYTES_MOST: Final = 1_000_000
_MAKE_ONE: Final = "'./trunkline agents join NAME --credentials FILE' writes one"


@dataclass(frozen=True)
class HubAccess:
    """Access to the hub over HTTP.

    Attributes:
        url: The address, such as `http://127.0.0.1:3200`. It may have a path in front of `/api`.
        token: The token of the agent, or None for requests without one.
    """

    url: str
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class MqttAccess:
    """Access to the mailbox over MQTT.

    Attributes:
        host: The broker's host.
        port: The broker's port.
        tls: Whether the broker's port has TLS.
        prefix: The first level of the topics.
        secret: The agent's secret, from which its password is derived.
    """

    host: str
    port: int
    tls: bool = False
    prefix: str = "agents"
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class McpAccess:
    """Access to the tools over MCP.

    Attributes:
        url: The address of the agents' MCP door.
        private_key: The agent's private key as PEM, which signs the calls.
    """

    url: str
    private_key: str = field(repr=False)


@dataclass(frozen=True)
class Credentials:
    """The name of an agent and its access to the doors. A door without access is None.

    Attributes:
        name: The name of the agent. Empty: the gateway knows it by the token.
        hub: Access to the hub over HTTP.
        mqtt: Access to the mailbox over MQTT.
        mcp: Access to the tools over MCP.
        ca_certs: A file with the certificate authority that the TLS of all doors must have. None: the
            authorities that the machine trusts.
    """

    name: str
    hub: HubAccess | None = None
    mqtt: MqttAccess | None = None
    mcp: McpAccess | None = None
    ca_certs: str | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read credentials from a file. A relative path in `ca_certs` begins at the folder of the file.

        Raises:
            NotFound: There is no such file.
            UsageError: Other users can read the file, it cannot be read, or its content is not valid.
        """
        place = Path(path)
        try:
            content = read_private(place, _BYTES_MOST + 1)
        except FileNotFoundError:
            raise NotFound(f"no credentials file {place}", advice=_MAKE_ONE) from None
        except OSError as error:
            raise UsageError(f"credentials file {place}: {error.strerror}") from None
        if len(content) > _BYTES_MOST:
            raise UsageError(f"credentials file {place}: more than {_BYTES_MOST} bytes", advice=_MAKE_ONE)
        try:
            found = cls._of(json.loads(content))
        except RecursionError:
            raise UsageError(f"credentials file {place}: too deep", advice=_MAKE_ONE) from None
        except ValueError as error:
            # The text of a JSONDecodeError has a place, and nothing of the content.
            raise UsageError(f"credentials file {place}: {error}", advice=_MAKE_ONE) from None
        if found.ca_certs is not None:
            # An absolute path is not changed by this.
            object.__setattr__(found, "ca_certs", str(place.parent / found.ca_certs))
        return found

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read credentials as the environment names them.

        TRUNKLINE_CREDENTIALS is the path of a file, and goes first. Without it, TRUNKLINE_HUB_URL and
        TRUNKLINE_AGENT_TOKEN are the access to the hub; TRUNKLINE_AGENT_NAME and TRUNKLINE_CA_CERTS may be
        added. These are the variables that the launcher gives to a spawned agent.

        Args:
            environment: The variables. None: those of this process.

        Raises:
            NotFound: There is no such file.
            UsageError: Neither is set, or a value is not valid.
        """
        variables = os.environ if environment is None else environment
        if path := variables.get(FILE_VARIABLE):
            return cls.load(path)
        missing = [name for name in (HUB_URL_VARIABLE, TOKEN_VARIABLE) if not variables.get(name)]
        if missing:
            raise UsageError(
                f"no credentials: {FILE_VARIABLE} and {' and '.join(missing)} are not set",
                advice=f"set {FILE_VARIABLE} to the path of a credentials file; {_MAKE_ONE}",
            )
        name = variables.get(NAME_VARIABLE, "")
        if name and not is_name(name):
            raise UsageError(f"{NAME_VARIABLE}: {name!r} is not a name of an agent")
        hub = HubAccess(variables[HUB_URL_VARIABLE], variables[TOKEN_VARIABLE])
        return cls(name, hub, ca_certs=variables.get(CA_VARIABLE) or None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the credentials to a file that only its owner can read. Replace an existing file at once.

        The folder must exist. A reader finds the old file or the new one, also after a power cut.

        Raises:
            UsageError: The file cannot be written.
        """
        place = Path(path)
        data = (json.dumps(self._as_json(), indent=1) + "\n").encode("utf-8")
        draft = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(place)
            finally:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
            folder = os.open(place.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise UsageError(f"credentials file {place}: {error.strerror}") from None

    def hub_access(self) -> HubAccess:
        """Return the access to the hub. Raises UsageError if the credentials have none."""
        return self._section("hub", self.hub)

    def mqtt_access(self) -> MqttAccess:
        """Return the access over MQTT. Raises UsageError if the credentials have none."""
        return self._section("mqtt", self.mqtt)

    def mcp_access(self) -> McpAccess:
        """Return the access over MCP. Raises UsageError if the credentials have none."""
        return self._section("mcp", self.mcp)

    def _section(self, name: str, found: _T | None) -> _T:
        if found is None:
            raise UsageError(
                f"the credentials of {self.name or 'this agent'} have no section {name!r}", advice=_MAKE_ONE
            )
        return found

    def _as_json(self) -> dict[str, Any]:
        sections = {"hub": self.hub, "mqtt": self.mqtt, "mcp": self.mcp}
        shown = {name: dict(vars(one)) for name, one in sections.items() if one is not None}
        return {"schema_version": SCHEMA_VERSION, "name": self.name, **shown, "ca_certs": self.ca_certs}

    @classmethod
    def _of(cls, found: Any) -> Self:
        """Return the credentials of a file's JSON. Raises ValueError."""
        if not isinstance(found, dict):
            raise ValueError("expected a JSON object")
        if (version := found.get("schema_version")) != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {version!r}, and this library reads {SCHEMA_VERSION}")
        name = _field(found, "name", str)
        if name and not is_name(name):
            raise ValueError(f"name: {name!r} is not a name of an agent")
        hub, mqtt, mcp = (_field(found, section, dict, None) for section in ("hub", "mqtt", "mcp"))
        return cls(
            name,
            None
            if hub is None
            else HubAccess(_field(hub, "url", str, at="hub."), _field(hub, "token", str, None, at="hub.")),
            None if mqtt is None else _mqtt_of(mqtt),
            None
            if mcp is None
            else McpAccess(_field(mcp, "url", str, at="mcp."), _field(mcp, "private_key", str, at="mcp.")),
            _field(found, "ca_certs", str, None),
        )


_REQUIRED: Final = object()
_WORDS: Final = {str: "a string", int: "a whole number", bool: "true or false", dict: "an object"}


def _mqtt_of(found: dict[str, Any]) -> MqttAccess:
    port = _field(found, "port", int, at="mqtt.")
    if not 0 < port < 65_536:
        raise ValueError(f"mqtt.port: {port} is not a port")
    return MqttAccess(
        _field(found, "host", str, at="mqtt."),
        port,
        _field(found, "tls", bool, False, at="mqtt."),
        _field(found, "prefix", str, "agents", at="mqtt."),
        _field(found, "secret", str, at="mqtt."),
    )


def _field(found: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED, at: str = "") -> Any:
    """Return a field of an object. The text of the ValueError never has its value, which may be a secret."""
    value = found.get(name)
    if value is None:
        if default is _REQUIRED:
            raise ValueError(f"{at}{name} is missing")
        return default
    if type(value) is not kind:
        raise ValueError(f"{at}{name}: expected {_WORDS[kind]}")
    return value
