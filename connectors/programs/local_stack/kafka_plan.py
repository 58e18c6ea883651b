"""The plan by which the stack runs a node of Kafka, with its settings file from `conf/`.

`kafka.bootstrap_servers` has an address for each node. A single node is its own controller. Several are one
cluster: a node whose disk is gone gets new storage, joins the controllers again (KIP-853, KIP-1186) and copies
the records from the others.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from connectors.plumbing.tls_keys.tls_files import KAFKA_INTERNAL, check_server_key, ensure_kafka_internal
from connectors.programs.local_stack.data_files import write_from_template
from connectors.programs.local_stack.java_programs import find_java
from connectors.programs.local_stack.kafka_login import (
    PLAINTEXT,
    SASL_PLAINTEXT,
    InternalListener,
    check_local_login,
    ensure_password,
    ensure_scram_user,
)
from connectors.programs.local_stack.part_plan import (
    JVM_LOCALE,
    KAFKA,
    LOOPBACK_NAMES,
    NotYet,
    PartPlan,
    all_but,
    group_of,
    jar_files,
    numbered,
)
from connectors.programs.local_stack.ports import (
    LOOPBACK,
    free_port,
    kafka_answers,
    port_is_free,
    port_owner,
    require_free,
)
from schemas.log_access.kafka_clients import bootstrap_addresses, kafka_context
from schemas.settings.settings import PROJECT_ROOT, Settings
from trunkline_agent.errors import BackboneUnreachable, TrunklineError, UsageError
from trunkline_agent.private_files import make_first, replace_file

# The format takes three seconds of processor time; on a busy machine that may be minutes.
_FORMAT_TIMEOUT_S: Final = 600
# Kafka's own default: it syncs never, and leaves that to the kernel.
_NO_SYNC: Final = 2**63 - 1
# With two copies none could be lost, because each record must be on two.
_FEWEST_COPIES: Final = 3


@dataclass(frozen=True)
class _Cluster:
    """Facts that the nodes of a cluster need of each other before they talk, in a file of the data directory.

    Attributes:
        id: The id of the cluster, which the storage of each node has, too.
        ports: For each node the ports of its listeners for other nodes, and for controllers.
        is_founded: Whether the first node has its first storage. It begins as the only controller; every later
            storage, also its own next one, joins.
    """

    id: str
    ports: list[tuple[int, int]]
    is_founded: bool = False


def kafka_ports(settings: Settings) -> list[int]:
    """Return the port of each node of the stack's Kafka, from `kafka.bootstrap_servers`.

    Raises:
        UsageError: An address is not on loopback, or there are two.
    """
    found = bootstrap_addresses(settings.kafka)
    if any(host not in LOOPBACK_NAMES for host, _ in found):
        raise UsageError(
            f"kafka.bootstrap_servers is {settings.kafka.bootstrap_servers!r}: the local stack starts its "
            "nodes on 127.0.0.1. Set it to 127.0.0.1:PORT, or to three of these. Or leave Kafka out, and "
            f"create the topic first: ./trunkline log create, then up --only {all_but(KAFKA)}"
        )
    if len(found) == 2:
        raise UsageError(
            "kafka.bootstrap_servers has two addresses: of two nodes none may fail. Set it to one, or to three"
        )
    return [port for _, port in found]


def _cluster_file(settings: Settings) -> Path:
    return settings.data_path / "kafka-cluster.json"


def _home(settings: Settings, number: int) -> Path:
    return settings.data_path / numbered(KAFKA, number)


def _has_storage(settings: Settings, number: int) -> bool:
    return (_home(settings, number) / "log" / "meta.properties").exists()


def _read_cluster(settings: Settings) -> _Cluster | None:
    try:
        found = json.loads(_cluster_file(settings).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return _Cluster(
        found["id"], [(inner, controller) for inner, controller in found["ports"]], found["is_founded"]
    )


def _check_nodes(settings: Settings, nodes: int) -> None:
    """Raise UsageError if the settings and the data directory do not fit for this number of nodes."""
    copies = settings.kafka.replication_factor
    if copies > nodes or (nodes > 1 and copies < _FEWEST_COPIES):
        raise UsageError(
            f"kafka.replication_factor is {copies}, and kafka.bootstrap_servers has {nodes} node(s): one node "
            "has one copy, and of three or more at least three have one (./trunkline up --profile durable)"
        )
    known, file = _read_cluster(settings), _cluster_file(settings)
    folders = (path.parents[1].name for path in settings.data_path.glob(f"{KAFKA}*/log/meta.properties"))
    stored = [name for name in folders if group_of(name) == KAFKA]  # and not a copy beside them
    found = max(1, len(stored)) if known is None else len(known.ports)
    if found != nodes and (known is not None or stored):
        raise UsageError(
            f"kafka.bootstrap_servers has {nodes} address(es), and {settings.data_path} has the data of "
            f"{found} node(s), a number that cannot change: set as many addresses as before, or set data_dir "
            "to a new folder (docs/how-to/run_the_stack.md#three-nodes-of-kafka says how it gets this log)"
        )
    if nodes > 1 and known is None and stored:
        raise UsageError(
            f"{file} is missing, and {', '.join(sorted(stored))} have data of its cluster: put a copy back, or "
            "let all nodes begin anew (docs/how-to/back_up_and_restore.md#one-part-is-lost)"
        )
    if known is not None and known.is_founded and not stored:
        raise UsageError(
            f"the folders of all nodes of Kafka are empty: is a disk not mounted? If all are lost, remove "
            f"{file}, and go on as docs/how-to/back_up_and_restore.md#kafkas-data-is-lost says"
        )


def _new_id() -> str:
    """Return the random id of a cluster. Kafka's tools would take a leading dash for an option."""
    found = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return "k" + found[1:] if found.startswith("-") else found


def _ensure_cluster(settings: Settings, nodes: int) -> _Cluster:
    """Return the cluster of this data directory, which the first node to start makes."""
    if found := _read_cluster(settings):
        return found
    made = _Cluster(_new_id(), [(free_port(), free_port()) for _ in range(nodes)])
    make_first(_cluster_file(settings), json.dumps(asdict(made)))
    return _read_cluster(settings) or made


def _java_command(settings: Settings) -> list[str]:
    jars = ":".join(map(str, jar_files("kafka")))
    return [
        str(find_java()),
        "-Xms128m",
        f"-Xmx{settings.kafka.heap_mb}m",
        # For a small heap and few cores the simple collector starts faster and uses less.
        "-XX:+UseSerialGC",
        # All of its threads exist when the part is ready, see `idle_threads` of the plan.
        "-XX:-UseDynamicNumberOfCompilerThreads",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={PROJECT_ROOT / 'conf' / 'log4j2.properties'}",
        "-cp",
        jars,
    ]


def _format_storage(settings: Settings, properties: Path, cluster: str, *options: str) -> None:
    command = [*_java_command(settings), "-XX:TieredStopAtLevel=1", "kafka.tools.StorageTool", "format"]
    done = subprocess.run(  # noqa: S603 the command is ours
        [*command, "--ignore-formatted", "-t", cluster, "-c", properties.name, *options],
        cwd=properties.parent,
        env=os.environ | JVM_LOCALE,
        capture_output=True,
        text=True,
        timeout=_FORMAT_TIMEOUT_S,
    )
    if done.returncode:
        raise TrunklineError(
            f"Kafka's storage could not be formatted: {(done.stderr or done.stdout).strip()[-800:]}"
        )


def _quorum(controller_ports: list[int]) -> str:
    """Return the lines of the settings file that say which controllers there are."""
    where = [f"{LOOPBACK}:{port}" for port in controller_ports]
    if len(where) == 1:
        return f"controller.quorum.voters=1@{where[0]}"
    return f"controller.quorum.bootstrap.servers={','.join(where)}\ncontroller.quorum.auto.join.enable=true"


def _write_properties(
    settings: Settings, number: int, listener: InternalListener, controller_ports: list[int]
) -> Path:
    """Write the settings file of a node and return its path."""
    kafka = settings.kafka
    nodes = len(controller_ports)
    copies = min(nodes, 3)
    protocol = kafka.security_protocol.lower().replace("_", "-")
    templates = ["kafka.properties", f"kafka-{protocol}.properties"]
    if kafka.security_protocol != PLAINTEXT:
        templates.append(f"kafka-internal-{'password' if listener.password else 'keys'}.properties")
    values: Mapping[str, object] = {
        "node": number,
        "quorum": _quorum(controller_ports),
        "port": kafka_ports(settings)[number - 1],
        "controller_port": controller_ports[number - 1],
        "internal_port": listener.port,
        "internal_protocol": "SASL_PLAINTEXT" if listener.password else "SSL",
        "broker_password": listener.password,
        "tls_dir": java_property(str(settings.tls_path.absolute())),
        "partitions": kafka.partitions,
        "record_limit_bytes": kafka.record_limit_bytes,
        "copies": copies,
        "copies_in_sync": max(1, copies - 1),
        "messages_unsynced": 1 if kafka.sync_each_batch else _NO_SYNC,
    }
    target = _home(settings, number) / "server.properties"
    write_from_template(target, values, *templates)
    return target


def java_property(text: str) -> str:
    """Return `text` as a value in a file of Java properties: in ASCII, with escapes (java.util.Properties)."""
    escaped = text.replace("\\", "\\\\").encode("utf-16-be")
    units = (int.from_bytes(escaped[at : at + 2], "big") for at in range(0, len(escaped), 2))
    return "".join(chr(unit) if 0x20 <= unit < 0x7F else f"\\u{unit:04x}" for unit in units)


def _prepare_alone(settings: Settings) -> InternalListener:
    """Write the files of a single node. Its own listeners are new at each start."""
    has_password = settings.kafka.security_protocol == SASL_PLAINTEXT
    listener = InternalListener(free_port(), secrets.token_urlsafe() if has_password else "")
    properties = _write_properties(settings, 1, listener, [free_port()])
    if not _has_storage(settings, 1):
        _format_storage(settings, properties, _new_id())
    return listener


def _prepare_node(settings: Settings, number: int, nodes: int) -> InternalListener:
    """Write the files of one node of several, which know each other by a key pair and not by a password."""
    cluster = _ensure_cluster(settings, nodes)
    internal_port, controller_port = cluster.ports[number - 1]
    for port in (internal_port, controller_port):
        if not port_is_free(port):
            raise TrunklineError(
                f"port {port}, by which Kafka's nodes reach each other ({_cluster_file(settings)}), is taken "
                f"by {port_owner(port)}: end that"
            )
    if settings.kafka.security_protocol == SASL_PLAINTEXT:
        ensure_kafka_internal(settings.tls_path)
        check_server_key(settings.tls_path / f"{KAFKA_INTERNAL}.pem")
    listener = InternalListener(internal_port, password="")
    properties = _write_properties(settings, number, listener, [port for _, port in cluster.ports])
    is_first = number == 1 and not cluster.is_founded
    if not _has_storage(settings, number):
        how = "--standalone" if is_first else "--no-initial-controllers"
        _format_storage(settings, properties, cluster.id, how)
    if is_first:
        founded = replace(cluster, is_founded=True)
        replace_file(_cluster_file(settings), json.dumps(asdict(founded)).encode())
    return listener


def kafka_plan(settings: Settings, number: int = 1) -> PartPlan:
    """Return the plan by which the stack runs a node of Kafka, with its data below `data_dir/kafka`.

    `number` counts the nodes from 1. From the second on, the names of part and folder contain it.

    After a node's first start, the plan creates the SCRAM user of the settings (not for PLAINTEXT) and the
    topic.

    Raises:
        UsageError: The settings name a Kafka or a login that the stack cannot run, or another number of nodes
            than the data directory has.
    """
    ports = kafka_ports(settings)
    port = ports[number - 1]
    check_local_login(settings)
    _check_nodes(settings, len(ports))
    internal = InternalListener(port=0, password="")
    home = _home(settings, number)

    def prepare() -> None:
        nonlocal internal
        require_free(port, "kafka.bootstrap_servers")
        ensure_password(settings)
        one = len(ports) == 1
        internal = _prepare_alone(settings) if one else _prepare_node(settings, number, len(ports))

    def ensure_topic() -> None:
        from connectors.log.kafka_topic import controllers
        from connectors.log.kafka_topic import ensure_topic as ensure
        from schemas.log_access.event_topic import LogLostError, LogUnfinishedError

        if settings.kafka.security_protocol != PLAINTEXT:
            ensure_scram_user(settings, internal)
        # Kafka itself is ready, and a rebuild of the log needs it. The programs that need the log refuse to
        # start.
        with suppress(LogLostError, LogUnfinishedError):
            try:
                ensure(settings)
                if len(ports) > 1 and (voters := controllers(settings.kafka)) < len(ports):
                    raise NotYet(f"{voters} of the {len(ports)} nodes are controllers")
            except BackboneUnreachable as error:
                if len(ports) == 1:
                    raise
                # The others may not be there yet, or have just come.
                raise NotYet(str(error)) from error

    return PartPlan(
        name=numbered(KAFKA, number),
        group=KAFKA,
        summary=f"Kafka on {LOOPBACK}:{port}",
        prepare=prepare,
        command=lambda: [*_java_command(settings), "kafka.Kafka", "server.properties"],
        is_ready=lambda: kafka_answers(LOOPBACK, port, context=kafka_context(settings.kafka)),
        on_first_ready=ensure_topic,
        stop_within_s=20,
        cwd=home,
        environment=JVM_LOCALE,
        # Java's second compiler saves a third of Kafka's time. It works for minutes after the start, and would
        # delay requests by up to 150 ms each.
        idle_threads="C2 Comp",
    )
