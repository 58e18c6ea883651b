"""All settings of Trunkline: one frozen model, read once at the start and passed on as an argument.

Later sources override earlier ones: the defaults below, `conf/trunkline.yaml` (or the file named by
`TRUNKLINE_CONF`), the variables `TRUNKLINE__SECTION__NAME`. The broker variables of JE-13 (`MQTT_BROKER`,
`MQTT_PORT`, …) are aliases that the `TRUNKLINE__MQTT__…` variables override. Paths in the settings are relative
to the checkout unless they are absolute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, SecretStr, ValidationError, model_validator

from schemas.settings.kafka_settings import KafkaSettings, default_password_file
from schemas.settings.sections import (
    AgentMcpSettings,
    AuditSettings,
    DashboardSettings,
    FileSettings,
    GatewaySettings,
    LimitSettings,
    MqttSettings,
    Section,
    SparkSettings,
    StorageSettings,
    ViewSettings,
    WebhookSettings,
    XmlPumpSettings,
)
from schemas.settings.setting_types import DataDirectory, address_at, check_ports_differ, listener_at
from trunkline_agent.private_files import PrivateFileError, check_private

# All other modules import the sections of the settings from here.
# mypy: implicit-reexport


PROJECT_ROOT = Path(__file__).resolve().parents[2]
ENV_PREFIX = "TRUNKLINE__"
_DEFAULT_FILE = PROJECT_ROOT / "conf" / "trunkline.yaml"
MASTER_KEY_VARIABLE = "TRUNKLINE__MASTER_KEY"

# JE-13: the names that users of MQTT tools already have in their environment.
ALIASES: dict[str, tuple[str, ...]] = {
    "MQTT_BROKER": ("mqtt", "host"),
    "MQTT_PORT": ("mqtt", "port"),
    "MQTT_TLS": ("mqtt", "tls"),
    "MQTT_CA_CERTS": ("mqtt", "ca_certs"),
    "MQTT_CERTFILE": ("mqtt", "certfile"),
    "MQTT_KEYFILE": ("mqtt", "keyfile"),
    "MQTT_USERNAME": ("mqtt", "username"),
    "MQTT_PASSWORD": ("mqtt", "password"),
    # AM-11
    "HTTP_PORT": ("dashboard", "port"),
    # AM-01, AM-07, AM-09
    "AGENT_MCP_PORT": ("agent_mcp", "port"),
    "AGENT_KEYS_PATH": ("agent_mcp", "keys_path"),
    "MESSAGE_EXPORT_INTERVAL": ("agent_mcp", "export_interval_ms"),
}

SECRETS = (("", "master_key"), ("mqtt", "password"), ("kafka", "sasl_password"))
SECRET_VARIABLES = frozenset(
    ENV_PREFIX + "__".join(part for part in (section, name) if part).upper() for section, name in SECRETS
)


class SettingsError(Exception):
    """A setting is wrong or unknown, or a file of a key or password cannot be used. The message names it."""


class Settings(Section):
    """All settings. Programs call `load_settings()` to create it; tests create the model directly."""

    data_dir: DataDirectory = Path("var")
    """Directory of everything that the stack writes."""
    master_key_file: Path | None = None
    """File with the master keys, mode 0600. Unset: `<data_dir>/keys/master.json`."""
    master_key: SecretStr | None = None
    """The master keys themselves. Only from the environment."""
    mac_key_file: Path | None = None
    """File with the key of a bridge that does not have the master keys, mode 0600. Unset: the master keys."""
    tls_dir: Path | None = None
    """Folder of the local authority's certificates and keys. Unset: `<data_dir>/keys/tls`."""
    kafka: KafkaSettings = KafkaSettings()
    mqtt: MqttSettings = MqttSettings()
    limits: LimitSettings = LimitSettings()
    spark: SparkSettings = SparkSettings()
    gateway: GatewaySettings = GatewaySettings()
    dashboard: DashboardSettings = DashboardSettings()
    agent_mcp: AgentMcpSettings = AgentMcpSettings()
    views: ViewSettings = ViewSettings()
    files: FileSettings = FileSettings()
    xml_pump: XmlPumpSettings = XmlPumpSettings()
    webhooks: WebhookSettings = WebhookSettings()
    storage: StorageSettings = StorageSettings()
    audit: AuditSettings = AuditSettings()

    @model_validator(mode="after")
    def _name_the_password_file(self) -> Self:
        kafka = self.kafka.model_copy()
        kafka._own_password_file = default_password_file(self.data_path)
        object.__setattr__(self, "kafka", kafka)  # the model is frozen; only its own validation may set a field
        return self

    @model_validator(mode="after")
    def _has_each_port_once(self) -> Self:
        check_ports_differ(
            (
                ("gateway.port", self.gateway.host, self.gateway.port),
                ("agent_mcp.port", self.agent_mcp.host, self.agent_mcp.port),
                ("dashboard.port", self.dashboard.host, self.dashboard.port),
                *listener_at("mqtt.port", f"{self.mqtt.host}:{self.mqtt.port}"),
                *listener_at("kafka.bootstrap_servers", self.kafka.bootstrap_servers),
            )
        )
        return self

    @property
    def data_path(self) -> Path:
        """The data directory as an absolute path. A relative `data_dir` is below the checkout."""
        return self.data_dir if self.data_dir.is_absolute() else PROJECT_ROOT / self.data_dir

    @property
    def tables_root(self) -> str:
        """The directory or URI that has one folder for each Delta table."""
        return self.storage.tables or str(self.data_path / "tables")

    @property
    def blobs_root(self) -> str:
        """The directory or URI that has the objects of all blobs."""
        return self.storage.blobs or f"{self.tables_root.rstrip('/')}/_blobs"

    @property
    def state_path(self) -> Path:
        """The directory of the local state stores. Everything in it is a cache and may be deleted."""
        return self.data_path / "state" if self.storage.state is None else PROJECT_ROOT / self.storage.state

    @property
    def key_file(self) -> Path:
        """The path of the file (mode 0600) with the master keys, unless `master_key` contains them."""
        return self.master_key_file or self.data_path / "keys" / "master.json"

    @property
    def tls_path(self) -> Path:
        """The folder with the certificates and keys of the stack's own certificate authority."""
        return self.tls_dir or self.data_path / "keys" / "tls"

    @property
    def http_scheme(self) -> str:
        """The URL scheme of all ports of the gateway: `https` if it has a certificate, else `http`."""
        return "http" if self.gateway.certfile is None else "https"

    @property
    def gateway_url(self) -> str:
        """The URL at which clients reach the gateway, without a slash at the end.

        It is the setting `gateway.url`. If that is unset, it is built from the gateway's host and port.
        """
        own = address_at(self.http_scheme, self.gateway.host, self.gateway.port)
        return (self.gateway.url or own).rstrip("/")

    @property
    def dashboard_url(self) -> str:
        """The URL of the dashboard for a browser on this machine, with a slash at the end.

        Do not use it if `dashboard.port` is 0: then there is no dashboard.
        """
        host = self.dashboard.host
        if host in ("0.0.0.0", "::"):  # noqa: S104  a wildcard includes this machine
            host = "127.0.0.1"
        return f"{address_at(self.http_scheme, host, self.dashboard.port)}/"

    @property
    def mcp_server_url(self) -> str:
        """The URL at which agents reach the agent MCP door, without a slash at the end.

        It is the setting `agent_mcp.url`. If that is unset, it is built from the door's host and port.
        """
        own = address_at(self.http_scheme, self.agent_mcp.host, self.agent_mcp.port)
        return (self.agent_mcp.url or own).rstrip("/")

    @property
    def agent_keys_path(self) -> Path:
        """The folder for the private keys of agents that the agent MCP door spawned on this machine."""
        return self.agent_mcp.keys_path or self.data_path / "agent_keys"

    @property
    def command_socket(self) -> Path:
        """The path of the Unix socket at which the gateway takes signed commands about the pump's listeners."""
        return self.xml_pump.command_socket or self.data_path / "run" / "commands.sock"

    @property
    def command_keys_path(self) -> Path:
        """The folder of the public keys whose signed commands the gateway accepts.

        The operator's private key is stored there, too.
        """
        return self.xml_pump.command_keys_dir or self.data_path / "keys" / "commands"

    @property
    def operator_token_file(self) -> Path:
        """The path of the file with the operator's token (mode 0600)."""
        return self.gateway.operator_token_file or self.data_path / "keys" / "operator.token"

    def table_path(self, table: str) -> str:
        """Return the path or URI of the Delta table with the name `table`, such as `ledger`."""
        return f"{self.tables_root}/{table}"


def load_settings(environ: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Read and validate the settings from the settings file and the environment, which overrides the file.

    Args:
        environ: The environment variables. None means those of this process.
        file: The settings file. None means the file that the variable `TRUNKLINE_CONF` names, or else
            `conf/trunkline.yaml`. Only that last one may be missing.

    Raises:
        SettingsError: The file cannot be read or contains a secret, or a setting is wrong or unknown. The
            message names it. A misspelt section in the name of a variable is an error, too.
    """
    values, _ = _collect(environ, file)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in error.errors()]
        raise SettingsError("wrong settings: " + "; ".join(lines)) from None


def setting_origins(environ: Mapping[str, str] | None = None, file: Path | None = None) -> dict[str, str]:
    """Return the source of each setting that the settings file or the environment sets.

    The keys are names such as `kafka.topic`. The values are the name of the environment variable or the path of
    the file. Settings with their default are absent. The values of settings are not validated.

    Args:
        environ: The environment variables. None means those of this process.
        file: The settings file. None means the file that the variable `TRUNKLINE_CONF` names, or else
            `conf/trunkline.yaml`.

    Raises:
        SettingsError: The file cannot be read, is not a mapping or contains a secret. It is also raised for the
            name of a variable that has a setting in the place of a section.
    """
    return _collect(environ, file)[1]


def settings_file(environ: Mapping[str, str] | None = None) -> Path:
    """Return the settings file: the one that `TRUNKLINE_CONF` names, or else `conf/trunkline.yaml`.

    `environ` has the environment variables; None means those of this process. The file may not exist.
    """
    named = (os.environ if environ is None else environ).get("TRUNKLINE_CONF")
    return Path(named) if named else _DEFAULT_FILE


def _collect(environ: Mapping[str, str] | None, file: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    env = os.environ if environ is None else environ
    chosen = file or settings_file(env)
    values = _from_file(chosen) if chosen != _DEFAULT_FILE or chosen.exists() else {}
    origins = dict.fromkeys(_names(values), str(chosen))
    paths = dict(ALIASES)
    for name in sorted(env):
        if name.startswith(ENV_PREFIX):
            paths[name] = tuple(part.lower() for part in name[len(ENV_PREFIX) :].split("__"))
    for name, path in paths.items():
        # An empty variable counts as not set, because the path "" would be the current directory. An empty data
        # directory is an error: a script with an unset variable would else work on the default one.
        if env.get(name) or (name in env and name == f"{ENV_PREFIX}DATA_DIR"):
            _merge(values, path, env[name])
            origins[".".join(path)] = name
    return values, origins


def _merge(base: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    """Set the value at `path` in a tree of sections. Raises SettingsError for a part that is not a section."""
    node = base
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise SettingsError(f"setting {'.'.join(path)}: {part} is not a section")
        node = child
    node[path[-1]] = value


def _from_file(path: Path) -> dict[str, Any]:
    """Return the sections of a settings file.

    Raises SettingsError when the file cannot be read, is not a mapping or contains a secret.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read settings from {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: expected a mapping of sections, found {type(loaded).__name__}")
    for section, name in SECRETS:
        node = loaded.get(section, {}) if section else loaded
        if isinstance(node, dict) and name in node:
            raise SettingsError(
                f"{name} in {path}: a secret comes from the environment, never from a file of conf"
            )
    return loaded


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def settings_environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables (`TRUNKLINE__…`) that pass these settings to a child process.

    With them, `load_settings` in the child returns equal settings. Only values that differ from the defaults
    are included. Secrets are included, too, because they must never be arguments of a command. The environment
    of this process does not change.
    """
    found: dict[str, str] = {}

    def walk(model: BaseModel, path: tuple[str, ...]) -> None:
        for name in type(model).model_fields:
            value = getattr(model, name)
            if isinstance(value, BaseModel):
                walk(value, (*path, name))
            elif value is not None and value != type(model).model_fields[name].default:
                plain = value.get_secret_value() if isinstance(value, SecretStr) else value
                found[ENV_PREFIX + "__".join((*path, name)).upper()] = str(plain)

    walk(settings, ())
    return found


def check_key_file(settings: str, certfile: Path, keyfile: Path | None) -> None:
    """Check that only the owner can read the file with the private key of a TLS certificate.

    A file that is missing, or whose mode cannot be read, passes: the code that opens it reports the error.

    Args:
        settings: the prefix of the setting's name in the error message, such as `gateway.` for
            `gateway.keyfile`.
        certfile: the file with the certificate.
        keyfile: the file with the private key. None means that it is in `certfile`, too.

    Raises:
        SettingsError: other users can read the file.
    """
    path, name = (certfile, "certfile") if keyfile is None else (keyfile, "keyfile")
    try:
        check_private(path)
    except PrivateFileError as error:
        raise SettingsError(f"{settings}{name}: {error}") from None
    except OSError:
        pass
