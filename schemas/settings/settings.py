"""Every setting of Trunkline: one frozen model, read once at the start and passed on as an argument.

Order of precedence, the later wins: the defaults below, `conf/trunkline.yaml` (or the file named by
`TRUNKLINE_CONF`), variables `TRUNKLINE__SECTION__NAME`. The broker variables of JE-13 (`MQTT_BROKER`,
`MQTT_PORT`, …) are aliases that the `TRUNKLINE__MQTT__…` names override. Paths in the settings are relative
to the checkout unless they are absolute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from schemas.settings.audit_settings import AuditSettings
from schemas.settings.connection_settings import ConnectionSettings
from schemas.settings.http_address import HttpAddress, address_at
from schemas.settings.kafka_settings import KafkaSettings as KafkaSettings
from schemas.settings.kafka_settings import default_password_file
from schemas.settings.setting_types import (
    DataDirectory,
    Heap,
    Host,
    SparkMaster,
    check_ports_differ,
    listener_at,
)
from schemas.settings.settings_sources import SECRETS, from_file, merge
from schemas.settings.settings_sources import SettingsError as SettingsError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
ENV_PREFIX = "TRUNKLINE__"
MASTER_KEY_VARIABLE = "TRUNKLINE__MASTER_KEY"

# JE-13: the names that users of MQTT tools already have in their environment.
_ALIASES = {
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


SECRET_VARIABLES = frozenset(
    ENV_PREFIX + "__".join(part for part in (section, name) if part).upper() for section, name in SECRETS
)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MqttSettings(_Section):
    """The broker of job events (JE-01, JE-13) and the publisher's timing (JE-15)."""

    host: Host = "127.0.0.1"
    port: int = Field(default=1883, ge=1, le=65535)
    tls: bool = False
    ca_certs: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    listen_host: Host = "127.0.0.1"  # of the local stack's Mosquitto, with TLS
    require_client_cert: bool = False
    username: str | None = None
    password: SecretStr | None = None
    topic_prefix: str = Field(default="python/mqtt/jobs", pattern=r"^[^+#\x00]*[^+#/\x00]$")
    agents_prefix: str = Field(default="python/mqtt/agents", pattern=r"^[^+#\x00]*[^+#/\x00]$")
    inbox_retry_s: float = Field(default=5.0, gt=0)
    connect_timeout_s: float = Field(default=10.0, gt=0)
    puback_timeout_s: float = Field(default=5.0, gt=0)
    receipt_timeout_s: float = Field(default=10.0, gt=0)
    publish_attempts: int = Field(default=3, ge=1)
    backoff_base_s: float = Field(default=0.5, ge=0)
    backoff_max_s: float = Field(default=8.0, ge=0)
    bridge_client_id: str = Field(default="trunkline-bridge", pattern=r"^[^+#/\x00]+$")
    bridge_keepalive_s: int = Field(default=4, ge=1, le=60)
    session_expiry_s: int = Field(default=7 * 24 * 3600, ge=1)
    bridge_inflight: int = Field(default=1000, ge=1, le=65535)
    receipt_verdict_wait_s: float = Field(default=1.0, ge=0)
    overlay_poll_s: float = Field(default=2.0, gt=0)
    overlay_linger_s: float = Field(default=60.0, ge=0)
    accounts_dir: Path | None = None  # where our own Mosquitto has its password file; None: it is not ours
    account_grace_s: float = Field(default=3600.0, ge=0)
    socket_dir: Path | None = None  # where our own Mosquitto has its private socket


class LimitSettings(_Section):
    """What a door lets in (CM-02)."""

    payload_bytes: int = Field(default=1024 * 1024, ge=1024)
    # No more than the wire form allows (TASK_TEXT_LIMIT).
    task_characters: int = Field(default=32_000, ge=1, le=32_000)


class GatewaySettings(ConnectionSettings):
    """The HTTP hub. Loopback unless told otherwise; `url` is where the command line and the bridge find it.

    With `certfile` and `keyfile` all listeners of the gateway speak HTTPS; its clients trust `ca_certs`.
    Without them they are loopback alone, unless `allow_plaintext` says that a proxy in front does TLS.
    """

    host: Host = "127.0.0.1"
    port: int = Field(default=3200, ge=1, le=65535)
    url: HttpAddress | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    ca_certs: Path | None = None
    allow_plaintext: bool = False
    operator_token_file: Path | None = None
    settle_timeout_s: float = Field(default=10.0, gt=0)
    reactor_group: str = "trunkline-reactor"
    session_check_s: float = Field(default=2.0, gt=0)
    audit_messages: int = Field(default=100, ge=1, le=100_000)
    mailbox_per_token: bool = False
    token_ttl_s: float = Field(default=3600.0, ge=1, le=7 * 24 * 3600)
    launch_timeout_s: float = Field(default=10.0, gt=0)
    task_check_s: float = Field(default=30.0, gt=0)
    stop_grace_s: float = Field(default=5.0, ge=0)
    agents_dir: Path = Path("conf/agents")
    launchers_file: Path = Path("conf/launchers.yaml")


class DashboardSettings(_Section):
    """The page for a person, served by the gateway. `port` 0: there is none."""

    host: Host = "127.0.0.1"
    port: int = Field(default=3000, ge=0, le=65535)


class AgentMcpSettings(_Section):
    """The agent MCP door, served by the gateway. `port` 0: there is none. `url` is where agents find it.

    `keys_path`: where a spawned agent's private key lies while it lives. `spawn_image` is what is spawned.
    """

    host: Host = "127.0.0.1"
    port: int = Field(default=3100, ge=0, le=65535)
    url: HttpAddress | None = None
    keys_path: Path | None = None
    spawn_image: str = "trunkline/mcp-agent"
    export_interval_ms: int = Field(default=3_600_000, ge=0)
    export_file: Path | None = None


class ViewSettings(_Section):
    """The views' job: how often it writes, and how often it tidies the tables up (0: never)."""

    interval_ms: int = Field(default=1500, ge=0)
    maintenance_interval_s: float = Field(default=600.0, ge=0)
    keep_old_files_h: float = Field(default=2.0, ge=0)


class SparkSettings(_Section):
    """The settling job. `shuffle_partitions`, how many tasks settle side by side, is frozen by the checkpoint:
    choose it at the first start. `master`: `local[N]`, or the URL of a standalone cluster, on whose executors
    each has `executor_memory`. `niceness`, 0 to 19: how far the local stack's Spark leaves the processor to
    doors, gateway and Kafka, which somebody waits for.
    """

    master: SparkMaster = "local[2]"
    driver_memory: Heap = "1g"
    executor_memory: Heap = "1g"
    shuffle_partitions: int = Field(default=2, ge=1)
    max_offsets_per_trigger: int = Field(default=60_000, ge=1)
    trigger_interval_ms: int = Field(default=0, ge=0)
    niceness: int = Field(default=10, ge=0, le=19)


class FileSettings(_Section):
    """The bridge of the file queue. `root`: the queue's folder; `poll_s`: how often it is looked at, whatever
    the file system tells.
    """

    root: Path | None = None
    poll_s: float = Field(default=0.5, gt=0)


class XmlPumpSettings(_Section):
    """The XML message pump (XP-08, XP-09, XP-11). `processes`: how many pumps the local stack runs;
    `concurrency`: how many messages one of them handles at once; `lease_margin_s`: how much longer a message is
    leased than its handler may take. `pending_most` and `pending_per_sender`: how many messages may wait for
    one listener, in all and of one sender; `sender_per_minute`: how many one sender may post, None: any number.
    `chain_most`: how many messages one may lead to, each asked by the listener of the one before.
    Without the file `organism_file` there are no listeners but those that commands add.
    """

    organism_file: Path = Path("conf/organism.yaml")
    processes: int = Field(default=1, ge=0, le=64)
    concurrency: int = Field(default=64, ge=1, le=1000)
    lease_margin_s: float = Field(default=5.0, gt=0, le=3600)
    pending_most: int = Field(default=10_000, ge=1)
    pending_per_sender: int = Field(default=1_000, ge=1)
    sender_per_minute: int | None = Field(default=None, ge=1)
    chain_most: int = Field(default=64, ge=1, le=1000)
    command_socket: Path | None = None
    command_keys_dir: Path | None = None


class StorageSettings(_Section):
    """Where things lie. None means: below `data_dir`. URIs of an object store are taken as they are."""

    tables: str | None = None
    checkpoints: str | None = None


class Settings(_Section):
    """All settings. Build it with `load_settings()`; tests build it directly."""

    data_dir: DataDirectory = Path("var")
    master_key_file: Path | None = None
    master_key: SecretStr | None = None
    tls_dir: Path | None = None
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
    storage: StorageSettings = StorageSettings()
    audit: AuditSettings = AuditSettings()

    @model_validator(mode="after")
    def _name_the_password_file(self) -> Self:
        kafka = self.kafka.model_copy()
        kafka._own_password_file = default_password_file(self.data_path)
        object.__setattr__(self, "kafka", kafka)  # the model is frozen for all but its own validation
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
        """The data directory as an absolute path."""
        return self.data_dir if self.data_dir.is_absolute() else PROJECT_ROOT / self.data_dir

    @property
    def tables_root(self) -> str:
        """Directory or URI below which each Delta table has a folder of its own."""
        return self.storage.tables or str(self.data_path / "tables")

    @property
    def checkpoints_root(self) -> str:
        """Directory or URI below which each streaming query has its checkpoint."""
        return self.storage.checkpoints or str(self.data_path / "checkpoints")

    @property
    def key_file(self) -> Path:
        """The 0600 file with the master keys."""
        return self.master_key_file or self.data_path / "keys" / "master.json"

    @property
    def tls_path(self) -> Path:
        """The folder with our own authority's certificates and keys."""
        return self.tls_dir or self.data_path / "keys" / "tls"

    @property
    def http_scheme(self) -> str:
        """What the gateway's listeners speak."""
        return "http" if self.gateway.certfile is None else "https"

    @property
    def gateway_url(self) -> str:
        """Where the gateway answers, without a slash at the end."""
        own = address_at(self.http_scheme, self.gateway.host, self.gateway.port)
        return (self.gateway.url or own).rstrip("/")

    @property
    def mcp_server_url(self) -> str:
        """Where an agent speaks MCP."""
        own = address_at(self.http_scheme, self.agent_mcp.host, self.agent_mcp.port)
        return (self.agent_mcp.url or own).rstrip("/")

    @property
    def agent_keys_path(self) -> Path:
        """The folder of the private keys of agents that were spawned here."""
        return self.agent_mcp.keys_path or self.data_path / "agent_keys"

    @property
    def command_socket(self) -> Path:
        """The Unix socket of the out-of-band commands."""
        return self.xml_pump.command_socket or self.data_path / "run" / "commands.sock"

    @property
    def command_keys_path(self) -> Path:
        """The folder of the public keys whose commands count, and of the operator's own private key."""
        return self.xml_pump.command_keys_dir or self.data_path / "keys" / "commands"

    @property
    def operator_token_file(self) -> Path:
        """The 0600 file with the operator's token."""
        return self.gateway.operator_token_file or self.data_path / "keys" / "operator.token"

    def table_path(self, table: str) -> str:
        """Path or URI of one Delta table."""
        return f"{self.tables_root}/{table}"


def load_settings(environ: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Read the settings from file and environment.

    Raises SettingsError that names the setting: an unknown one, also a misspelt section in a variable's
    name, is an error and not ignored.
    """
    env = os.environ if environ is None else environ
    default_file = PROJECT_ROOT / "conf" / "trunkline.yaml"
    chosen = file or (Path(env["TRUNKLINE_CONF"]) if env.get("TRUNKLINE_CONF") else default_file)
    values = from_file(chosen) if chosen != default_file or chosen.exists() else {}
    for name, alias in _ALIASES.items():
        if env.get(name):
            merge(values, alias, env[name])
    for name in sorted(env):
        # Empty means not set, as with the aliases: a path of "" would be the current directory. The data
        # directory is an exception: a script with an unset variable in it would work on the default one.
        if name.startswith(ENV_PREFIX) and (env[name] or name == f"{ENV_PREFIX}DATA_DIR"):
            path: tuple[str, ...] = tuple(part.lower() for part in name[len(ENV_PREFIX) :].split("__"))
            merge(values, path, env[name])
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in error.errors()]
        raise SettingsError("wrong settings: " + "; ".join(lines)) from None


def settings_environment(settings: Settings) -> dict[str, str]:
    """The `TRUNKLINE__…` variables that make `load_settings` in a child process equal to `settings`.

    Only what differs from the defaults is named. Secrets travel in the environment, never as arguments.
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
