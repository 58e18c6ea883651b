"""The sections of the settings, one model each. The text below a field is its description in the reference.

A name that ends in `_s`, `_ms`, `_h`, `_mb` or `_bytes` gives the unit. Paths are relative to the checkout
unless they are absolute.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from schemas.settings.setting_types import (
    Heap,
    Host,
    HostNameList,
    HttpAddress,
    Networks,
    Place,
    SparkMaster,
)

_PORT_MOST = 65535
_TOPIC_PREFIX = r"^[^+#\x00]*[^+#/\x00]$"


class Section(BaseModel):
    """The base class of a section: a group of settings that cannot change. An unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class MqttSettings(Section):
    """The MQTT broker of job events, the publisher's timing and the MQTT bridge (JE-01, JE-13, JE-15)."""

    host: Host = "127.0.0.1"
    """Host of the broker."""
    port: int = Field(default=1883, ge=1, le=_PORT_MOST)
    """TCP port of the broker."""
    tls: bool = False
    """True if clients speak TLS to the broker."""
    ca_certs: Path | None = None
    """PEM file of the authority that signed the broker's certificate. Unset: the system's authorities."""
    certfile: Path | None = None
    """PEM file with the client's certificate, if the broker asks for one."""
    keyfile: Path | None = None
    """PEM file with the key of `certfile`."""
    listen_host: Host = "127.0.0.1"
    """Address on which the stack's own Mosquitto listens under TLS."""
    require_client_cert: bool = False
    """True if the stack's own Mosquitto asks each client for a certificate as well as a password."""
    username: str | None = None
    """User name at the broker."""
    password: SecretStr | None = None
    """Password at the broker. Only from the environment."""
    user_is_client_id: bool = False
    """True if the stack's own Mosquitto replaces each client's id by its user name, at its port."""
    topic_prefix: str = Field(default="python/mqtt/jobs", pattern=_TOPIC_PREFIX)
    """Topic below which job events are published."""
    agents_prefix: str = Field(default="python/mqtt/agents", pattern=_TOPIC_PREFIX)
    """Topic below which agents have their inbox and outbox."""
    inbox_retry_s: float = Field(default=5.0, gt=0)
    """Longest pause before the bridge offers a message again to an agent whose inbox has no subscriber."""
    inbox_confirm_s: float = Field(default=30.0, gt=0)
    """Pause before the bridge publishes again what an agent did not confirm. It doubles up to 15 minutes."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    """How long a publisher waits for a connection."""
    puback_timeout_s: float = Field(default=5.0, gt=0)
    """How long a publisher waits for the broker's acknowledgement."""
    receipt_timeout_s: float = Field(default=10.0, gt=0)
    """How long a publisher waits for the backbone's receipt."""
    publish_attempts: int = Field(default=3, ge=1)
    """How often a publisher sends one event before it reports a failure."""
    backoff_base_s: float = Field(default=0.5, ge=0)
    """Pause after the first failed attempt. It doubles with each further one."""
    backoff_max_s: float = Field(default=8.0, ge=0)
    """Longest pause between two attempts."""
    bridge_client_id: str = Field(default="trunkline-bridge", pattern=r"^[^+#/\x00]+$")
    """Name of the bridge, and the first part of its client id. The broker keeps a session under that id."""
    bridge_keepalive_s: int = Field(default=4, ge=1, le=60)
    """Keep-alive of the bridge. A standby bridge takes over after 1.5 times this without a sign of life."""
    session_expiry_s: int = Field(default=7 * 24 * 3600, ge=1)
    """How long the broker keeps the session of a bridge that is away."""
    bridge_inflight: int = Field(default=100, ge=1, le=65535)
    """How many messages the bridge has under way to the log at once. Publishers take turns for them."""
    publisher_inflight: int = Field(default=10, ge=1, le=65535)
    """How many of these may be of one job or agent."""
    bridge_read_ahead: int = Field(default=2000, ge=1, le=65535)
    """How many unacknowledged messages the broker sends to the bridge at once."""
    receipt_verdict_wait_s: float = Field(default=1.0, ge=0)
    """How long a receipt waits for the gateway's verdict after Kafka acknowledged the record."""
    overlay_poll_s: float = Field(default=2.0, gt=0)
    """How often the bridge asks the gateway for the brokers of live jobs."""
    overlay_linger_s: float = Field(default=60.0, ge=0)
    """How long the bridge stays connected to a job's own broker after its last job ended."""
    accounts_dir: Path | None = None
    """Folder of Mosquitto's password and ACL files. The stack sets it. Unset: the broker is not ours."""
    account_grace_s: float = Field(default=3600.0, ge=0)
    """How long a job's account at Mosquitto outlives the job."""
    socket_dir: Path | None = None
    """Folder of Mosquitto's private socket. The stack sets it. Unset: the broker is reached at its port."""


class LimitSettings(Section):
    """Limits for the length of a record's body and of a task's text, the same at every door (CM-02)."""

    payload_bytes: int = Field(default=1024 * 1024, ge=1024)
    """Largest body. A larger one is rejected as `too_large`."""
    # JSON may write a byte as six, and clients read answers of 128 MiB.
    answer_bytes: int = Field(default=8 * 1024 * 1024, ge=64 * 1024, le=16 * 1024 * 1024)
    """Largest sum of bodies in one answer. One body always fits, and the rest comes with the next answer."""
    # No more than the wire form allows (TASK_TEXT_LIMIT).
    task_characters: int = Field(default=32_000, ge=1, le=32_000)
    """Longest text of a task. The agent gets it as an environment variable."""
    blob_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Largest blob, a content outside the log. A larger one is refused as `too_large`."""
    # No more than the wire form allows (KEEP_S_MOST).
    blob_keep_s: int = Field(default=3600, ge=1, le=366 * 24 * 3600)
    """How long a blob is kept after its upload, and after the end of the last message that refers to it."""


class ConnectionSettings(Section):
    """Limits of the connections to the gateway's TCP ports. They are part of the section `gateway`.

    Counts are for all ports of the gateway together: hub, dashboard and agent MCP door.
    """

    anonymous_connections: int = Field(default=256, ge=8, le=100_000)
    """Connections without an admitted request. Beyond this the oldest idle one is closed."""
    connections: int = Field(default=2000, ge=8, le=100_000)
    """Connections with an admitted request. A principal may have about as many as it leaves free."""
    head_timeout_s: float = Field(default=10.0, gt=0)
    """Time from the start of a connection, or of a later request, to the end of the head, TLS included."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Time from the end of a request's head to the end of its body."""
    # Longer than clients keep an idle connection, so that they close it and never meet a closed one.
    idle_timeout_s: int = Field(default=75, ge=1)
    """Time between two requests of an authenticated connection. For others `head_timeout_s` counts."""
    answer_memory_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Bytes of all answers and streams under way together. Further ones wait, then get 503 `busy`."""
    streams: int = Field(default=512, ge=8, le=100_000)
    """Event streams at once: so many of records, of messages, and of the dashboard. Shared like connections."""
    stream_unread_s: float = Field(default=60.0, gt=0)
    """Time in which the client of an event stream must read 64 KiB. It is 5 s while others wait for memory."""


class GatewaySettings(ConnectionSettings):
    """The gateway and its HTTP hub. With `certfile` and `keyfile`, all ports of the gateway speak HTTPS."""

    host: Host = "127.0.0.1"
    """Address on which the hub listens."""
    port: int = Field(default=3200, ge=1, le=_PORT_MOST)
    """TCP port of the hub."""
    url: HttpAddress | None = None
    """URL at which clients find the hub, if it differs from host and port."""
    host_names: HostNameList = ""
    """Further names or addresses, by commas, under which clients reach the dashboard and the agent MCP door."""
    certfile: Path | None = None
    """PEM file with the certificate of the hub, the dashboard and the agent MCP door."""
    keyfile: Path | None = None
    """PEM file with the key of `certfile`."""
    ca_certs: Path | None = None
    """PEM file of the authority that the hub's clients trust."""
    allow_plaintext: bool = False
    """True if listeners may leave loopback without TLS, because a proxy in front of them does TLS."""
    operator_token_file: Path | None = None
    """File with the operator's token, mode 0600. Unset: `<data_dir>/keys/operator.token`."""
    settle_timeout_s: float = Field(default=10.0, gt=0)
    """How long a request waits until its record is settled."""
    reactor_group: str = "trunkline-reactor"
    """Kafka consumer group of the reactor. Its committed offsets are the reactor's progress."""
    session_check_s: float = Field(default=2.0, gt=0)
    """How often the gateway checks the processes of agent sessions."""
    audit_messages: int = Field(default=100, ge=1, le=100_000)
    """How many messages and refusals the hub's audit log keeps in memory."""
    max_attempts: int = Field(default=5, ge=1, le=1000)
    """How often an agent may lease a message without acknowledging it, before the message is dead."""
    long_lease_s: float = Field(default=1800.0, gt=0)
    """A message that one reader holds for longer is named by metrics and `doctor`: its handler may hang."""
    mailbox_per_token: bool = False
    """True if each running task has its own mailbox, `<agent>.<token_id>`. The same at all gateways."""
    token_ttl_s: float = Field(default=3600.0, ge=1, le=7 * 24 * 3600)
    """How long the token of a task is valid."""
    launch_timeout_s: float = Field(default=10.0, gt=0)
    """How long a request that creates a task waits for the start of its agent."""
    task_check_s: float = Field(default=30.0, gt=0)
    """How often the gateway checks the processes of running tasks."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    """How long an agent has to end by itself after its task ended."""
    agents_dir: Path = Path("conf/agents")
    """Folder with the definitions of agents, `*.json`."""
    launchers_file: Path = Path("conf/launchers.yaml")
    """File that names the command of each image."""


class DashboardSettings(Section):
    """The dashboard, served by the gateway."""

    host: Host = "127.0.0.1"
    """Address on which the dashboard listens."""
    port: int = Field(default=3000, ge=0, le=_PORT_MOST)
    """TCP port of the dashboard. 0: there is none."""


class AgentMcpSettings(Section):
    """The agent MCP door, served by the gateway."""

    host: Host = "127.0.0.1"
    """Address on which the agent MCP door listens."""
    port: int = Field(default=3100, ge=0, le=_PORT_MOST)
    """TCP port of the agent MCP door. 0: there is none."""
    url: HttpAddress | None = None
    """URL at which agents find the door, if it differs from host and port."""
    keys_path: Path | None = None
    """Folder for the private keys of spawned agents while they run. Unset: `<data_dir>/agent_keys`."""
    spawn_image: str = "trunkline/mcp-agent"
    """Image that `spawn_agent` starts. `gateway.launchers_file` names its command."""
    export_interval_ms: int = Field(default=3_600_000, ge=0)
    """How often messages are exported. 0: never."""
    export_file: Place | None = None
    """File or URI of the message export. Unset: `<data_dir>/export/messages.parquet`."""


class ViewSettings(Section):
    """The Spark job that writes the view tables."""

    interval_ms: int = Field(default=1500, ge=0)
    """How often the view tables are written. Each time costs about half a second of a core."""
    maintenance_interval_s: float = Field(default=600.0, ge=0)
    """How often small files are compacted and old ones removed. 0: never."""
    keep_old_files_h: float = Field(default=2.0, ge=0)
    """How long files stay that no current version of a table needs."""


class SparkSettings(Section):
    """The Spark job that settles the log into the ledger."""

    master: SparkMaster = "local[2]"
    """`local[N]`, or the URL of a standalone cluster."""
    driver_memory: Heap = "1g"
    """Heap of the driver, such as `700m` or `2g`; at least 512m."""
    executor_memory: Heap = "1g"
    """Heap of each executor on a cluster; at least 512m."""
    tasks: int = Field(default=2, ge=1)
    """How many tasks settle side by side."""
    max_offsets_per_trigger: int = Field(default=60_000, ge=1)
    """Most records in one micro-batch. Times the body limit, it bounds the memory."""
    trigger_interval_ms: int = Field(default=500, ge=0)
    """Shortest time between the starts of two micro-batches. 0: the next starts when the last has ended."""
    niceness: int = Field(default=10, ge=0, le=19)
    """Niceness of the local stack's Spark, so that doors, gateway and Kafka come first. 0: none."""
    silent_after_s: float = Field(default=30.0, ge=1)
    """How long the writer of the tables must give no sign of life before another machine takes them over."""


class FileSettings(Section):
    """The bridge between the file queue and the mailboxes."""

    root: Path | None = None
    """Folder of the file queue. Unset: the user's own queue, or `queue` below another `data_dir`."""
    poll_s: float = Field(default=0.5, gt=0)
    """How often the bridge looks at the folder, besides the file system's notifications."""


class XmlPumpSettings(Section):
    """The XML message pump and its signed commands (XP-08, XP-09, XP-11)."""

    organism_file: Path = Path("conf/organism.yaml")
    """File with the listeners. Without the file there are only those that commands add."""
    processes: int = Field(default=1, ge=0, le=64)
    """How many pump processes the local stack runs."""
    concurrency: int = Field(default=64, ge=1, le=1000)
    """How many messages one pump process handles at once."""
    lease_margin_s: float = Field(default=5.0, gt=0, le=3600)
    """How much longer a message is leased than its handler may take."""
    pending_most: int = Field(default=10_000, ge=1)
    """Most messages that may wait for one listener. Beyond it the hub answers 429."""
    pending_per_sender: int = Field(default=1_000, ge=1)
    """Most messages of one sender that may wait for one listener. Beyond it the hub answers 429."""
    sender_per_minute: int | None = Field(default=None, ge=1)
    """Most messages that one sender may post in a minute. Unset: any number."""
    chain_most: int = Field(default=64, ge=1, le=1000)
    """Longest chain of messages in which each listener asks another. A longer one is refused with a `<huh>`."""
    command_socket: Path | None = None
    """Unix socket of the signed commands. Unset: `<data_dir>/run/commands.sock`."""
    command_keys_dir: Path | None = None
    """Folder of the public keys whose commands are accepted. Unset: `<data_dir>/keys/commands`."""


class WebhookSettings(Section):
    """The calls of webhooks, which every gateway makes (WH-02, WH-03)."""

    allow_networks: Networks = ""
    """Networks whose addresses may be called although they are not public, such as `10.0.0.0/8, fd00::/8`."""
    allow_http: bool = False
    """True if a webhook may have a URL without TLS."""
    ca_certs: Path | None = None
    """PEM file of the authorities that the calls trust. Unset: the system's authorities."""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """How long a call waits for a connection, name look-up and TLS included."""
    timeout_s: float = Field(default=15.0, gt=0, le=300)
    """How long a call may take altogether."""
    calls_at_once: int = Field(default=4, ge=1, le=64)
    """Most calls of one webhook at once. With 1, messages are called one after the other."""
    calls_shared: int = Field(default=64, ge=1, le=1000)
    """Most calls at once besides the first of each webhook."""
    webhooks_most: int = Field(default=500, ge=1, le=10_000)
    """Most webhooks that may be set."""
    max_attempts: int = Field(default=16, ge=1, le=1000)
    """How often a webhook is called with one message before the message is dead."""
    retry_first_s: float = Field(default=5.0, gt=0, le=3600)
    """Pause after the first failed attempt. It doubles with each further one."""
    retry_most_s: float = Field(default=3600.0, gt=0, le=43_200)
    """Longest pause between two attempts."""


class StorageSettings(Section):
    """Where the tables and the local state are stored."""

    tables: str | None = None
    """Directory or URI of the Delta tables. Unset: `<data_dir>/tables`."""
    blobs: str | None = None
    """Directory or URI of the blobs of this log alone, the same for all gateways. Unset: `_blobs` below the
    tables. An object store takes the credentials of the tables."""
    state: Path | None = None
    """Directory of the state stores and of the indexes of view keys, on a local disk of each machine.
    Unset: `<data_dir>/state`."""


class AuditSettings(Section):
    """The audit chain (Merkle roots over the rows of the ledger) and its signed anchors."""

    chain_dir: Place | None = None
    """Folder or URI of the chain. Unset: `<data_dir>/audit`."""
    anchors_dir: Place | None = None
    """Folder or URI of the anchors, best on append-only storage. Unset: `<data_dir>/anchors`."""
    key_file: Path | None = None
    """File with the key that signs anchors, mode 0600. Unset: `<data_dir>/keys/audit.pem`."""
    anchor_interval_s: float = Field(default=60.0, gt=0)
    """How often an anchor is made, if the ledger has grown."""
