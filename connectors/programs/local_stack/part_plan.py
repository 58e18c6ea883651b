"""The plan by which the local stack runs one part, the names of all parts, and the programs that they run.

It finds Mosquitto, Spark, and the jars of Kafka and Spark (`java_programs` finds Java), and has the options of
spark-submit that say where tasks run: in the driver, or on a cluster's executors.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from connectors.programs.local_stack.java_programs import java_home
from connectors.programs.local_stack.ports import LOOPBACK
from schemas.settings.kafka_settings import OAUTHBEARER
from schemas.settings.settings import PROJECT_ROOT, KafkaSettings, Settings
from trunkline_agent.errors import TrunklineError

KAFKA, MOSQUITTO, BRIDGE, GATEWAY, STREAMS = "kafka", "mosquitto", "bridge", "gateway", "streams"
FILES = "files"
XML_PUMP = "xml_pump"

ALL_PARTS = (KAFKA, MOSQUITTO, BRIDGE, FILES, GATEWAY, XML_PUMP, STREAMS)
# All other parts read or write the log. They wait for Kafka if the stack runs it.
START_WITHOUT_KAFKA = (KAFKA, MOSQUITTO)
# A part that writes ends before the part that it writes to.
STOP_ORDER = (BRIDGE, FILES, XML_PUMP, GATEWAY, STREAMS, MOSQUITTO, KAFKA)
LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost"})
_NUMBERED: Final = re.compile(r"(?P<group>[a-z_]+)_[1-9][0-9]*").fullmatch


def numbered(group: str, number: int) -> str:
    """Return the name of a group's part by its number, counted from 1: `kafka`, `kafka_2`, `kafka_3`."""
    return group if number == 1 else f"{group}_{number}"


def group_of(part: str) -> str:
    """Return the name in ALL_PARTS of the group of a part: `kafka` for `kafka_2`."""
    found = _NUMBERED(part)
    return part if found is None else found["group"]


def all_but(part: str) -> str:
    """Return the names of all parts but one, by commas, for a command's option."""
    return ",".join(name for name in ALL_PARTS if name != part)


class NotYet(Exception):
    """The work that follows a part's start cannot be done before another part has come, too."""


@dataclass(frozen=True)
class PartPlan:
    """The instructions to start, check and stop one part of the stack.

    Attributes:
        name: the part's name; its log is `<name>.log`.
        summary: a text for people, such as `Kafka on 127.0.0.1:9092`.
        command: returns the program and its arguments.
        is_ready: returns whether the running process is ready. It must return soon.
        stop_within_s: how long the process may take to end before it is killed, in seconds.
        cwd: the folder in which the process runs.
        stalled_after_s: a start has failed if it makes no progress for this many seconds.
        prepare: called before each start, for example to write the program's settings file.
        terminate: asks the process with this id to end.
        on_first_ready: called when the program is ready for the first time, and again after an error or NotYet.
            The part is not ready before it has succeeded.
        environment: variables in addition to the settings.
        credentials: returns variables with secrets, at each start.
        group: the part of ALL_PARTS of which this is one more process. None: the part is its own group.
        niceness: how much the nice value is raised once the part is ready.
        idle_threads: what the names of threads begin with that then get only the time that no other wants.
        is_well: returns whether a ready part still answers. Called on its own thread; may take seconds. None:
            the part is not asked.
    """

    name: str
    summary: str
    command: Callable[[], list[str]]
    is_ready: Callable[[], bool]
    stop_within_s: float
    cwd: Path
    stalled_after_s: float = 60.0
    prepare: Callable[[], None] = lambda: None
    terminate: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGTERM)
    on_first_ready: Callable[[], None] = lambda: None
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: Callable[[], Mapping[str, str]] = dict
    group: str | None = None
    niceness: int = 0
    idle_threads: str = ""
    is_well: Callable[[], bool] | None = None


JARS = PROJECT_ROOT / ".jars"
# A JVM encodes file names by its locale. In any other one than UTF-8 it finds no file with `ö` in its path.
JVM_LOCALE: Final = {"LC_ALL": "C.UTF-8"}
_SET_UP = "run ./trunkline doctor in the checkout, which sets up what is missing"


def find_mosquitto() -> Path:
    """Return the path of the program Mosquitto, from PATH or from folders that are only in root's PATH.

    Raises:
        TrunklineError: There is none.
    """
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if not found:
        raise TrunklineError("Mosquitto is not found: sudo apt-get install -y mosquitto")
    return Path(found)


def spark_home() -> Path:
    """Return the folder of the Spark that the installed Python package pyspark contains.

    Raises:
        TrunklineError: pyspark is not installed.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise TrunklineError(f"pyspark is not installed: {_SET_UP}")
    return Path(spec.origin).parent


def jar_files(part: str) -> list[Path]:
    """Return the paths of the jars that `./trunkline` has downloaded, sorted by name.

    `part` is `kafka`, `spark` or `s3`.

    Raises:
        TrunklineError: There are none.
    """
    found = sorted((JARS / part).glob("*.jar"))
    if not found:
        raise TrunklineError(f"no jars in .jars/{part}: {_SET_UP}")
    return found


# For a session that reads or writes tables with Spark's Delta. The jobs do not use it: its rules run in each
# plan that Spark makes, which takes a tenth of a micro-batch (decision 0011).
DELTA_CONF: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The default of 50 made the first read of a table take seconds.
    "spark.databricks.delta.snapshotPartitions": "2",
}


def is_local(master: str) -> bool:
    """Return whether this value of `spark.master` runs driver and tasks in one process, such as `local[2]`."""
    return master.partition("[")[0] == "local"


def jvm_options(kafka: KafkaSettings) -> str:
    """Return the JVM options of Spark's driver and executors.

    They are the configuration of the log, and for a login by OAUTHBEARER the address of the token server, the
    only one at which Kafka's client asks.
    """
    log = f"-Dlog4j2.configurationFile={(PROJECT_ROOT / 'conf' / 'log4j2.properties').as_uri()}"
    if kafka.sasl_mechanism != OAUTHBEARER:
        return log
    return f"{log} -Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={kafka.oauth_token_url}"


def class_path() -> str:
    """Return the class path of Spark's connectors and of the local file system, for driver and executors.

    Hadoop looks for these jars before Spark has added its own.

    Raises:
        TrunklineError: The jars are not installed.
    """
    return os.pathsep.join(str(jar) for jar in jar_files("spark"))


def object_store_conf(tables_root: str) -> dict[str, str]:
    """Return Spark's properties, by name, to read tables at a URI. Empty for a local folder.

    The login is that of the other programs: the usual variables of the environment (`AWS_…`). Raises
    TrunklineError when the jars for S3 are not there.
    """
    if not tables_root.startswith("s3://"):
        return {}
    jar_files("s3")
    a3 = "spark.hadoop.fs.s3a"
    found = {"spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        found |= {f"{a3}.endpoint": endpoint, f"{a3}.path.style.access": "true"}
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        found[f"{a3}.endpoint.region"] = region
    return found


def executor_conf(settings: Settings) -> dict[str, str]:
    """Return Spark's properties for executors on a cluster, by name.

    Executors inherit nothing else from the driver. They find modules and jars in a checkout at the same path.
    Keys and passwords come from files, or from the environment of Spark's worker process that starts the
    executors (decision 0022).
    """
    return {
        "spark.executor.memory": settings.spark.executor_memory,
        # More cores would never be used at once; the rest of the cluster is for other applications.
        "spark.cores.max": str(settings.spark.tasks),
        "spark.executor.extraClassPath": class_path(),
        "spark.executor.extraJavaOptions": jvm_options(settings.kafka),
        "spark.executorEnv.PYTHONPATH": str(PROJECT_ROOT),
        # How long a task waits for the executor that has settled its partition before, and how often the
        # scheduler looks for waiting tasks. The defaults, 3 s and 1 s, are longer than the preceding tasks
        # take: a worker that came back would settle nothing for a long time, or never.
        "spark.locality.wait": "100ms",
        "spark.scheduler.revive.interval": "100ms",
    }


def place_options(settings: Settings) -> list[str]:
    """Return the options of spark-submit that say where tasks run, by `spark.master`.

    On a cluster they include the executors' properties.
    """
    where = ["--master", settings.spark.master]
    if is_local(settings.spark.master):
        return where
    pairs = [word for name, value in executor_conf(settings).items() for word in ("--conf", f"{name}={value}")]
    # The cluster's own properties include its secret, which must not be on a command line.
    return [*where, "--load-spark-defaults", *pairs]


def reader_class_path(settings: Settings) -> str:
    """Return the class path of a Spark that reads the tables; with those in an object store, its jars, too."""
    is_local = not object_store_conf(settings.tables_root)
    return os.pathsep.join(map(str, [*jar_files("spark"), *(() if is_local else jar_files("s3"))]))


def reader_environment(
    settings: Settings, scratch: str, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables with which a Python process starts a Spark that reads the tables.

    Args:
        settings: The settings, which say where the tables are and where tasks run.
        scratch: A folder for Spark's own files. The caller deletes it when the process has ended.
        more: Further properties of Spark.

    Raises:
        TrunklineError: There is no Java 17, 21 or 25, or Spark's jars are not installed.
    """
    properties = {
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(settings.spark.tasks),
        "spark.local.dir": scratch,
        "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        # By default Ivy's folder is in the home, which a user may not have.
        "spark.jars.ivy": f"{scratch}/ivy",
        **DELTA_CONF,
        **object_store_conf(settings.tables_root),
        **(more or {}),
    }
    options = [
        *("--properties-file", str(PROJECT_ROOT / "conf" / "spark-defaults.conf")),
        *("--driver-memory", settings.spark.driver_memory, *place_options(settings)),
        *("--driver-class-path", reader_class_path(settings)),
        *(word for name, value in properties.items() for word in ("--conf", f"{name}={value}")),
    ]
    return {
        "JAVA_HOME": str(java_home()),
        # Without it a JVM does not find jars below a folder whose name is not ASCII.
        **JVM_LOCALE,
        "PYSPARK_PYTHON": sys.executable,
        # An old address of this machine in its hosts file would make Spark listen elsewhere.
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYSPARK_SUBMIT_ARGS": shlex.join([*options, "pyspark-shell"]),
    }
