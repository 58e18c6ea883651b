"""Archives of the classes that Kafka and Spark load, so that their JVMs start in less time.

    .venv/bin/python -m tests.class_archives

A JVM that maps an archive (class data sharing of the JDK) starts Kafka with 0.6 and Spark with 0.65 of the
processor's time. A run of all tests first makes the archives if they are missing, in half a minute. A JVM whose
class path does not begin with that of the archive ignores it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from connectors.programs.local_stack.java_programs import find_java
from connectors.programs.local_stack.part_plan import class_path, jar_files
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.tables.ledger import LEDGER
from tests.broker_processes import ProgramProcess, kafka_at, make_kafka, wait_until
from tests.jobs.topic_load import append_all, event, registration
from tests.own_settings import make_topic

# Nearly all the JVMs of the tests live for seconds: the second compiler would cost more than it gains.
QUICK_JVM = "-XX:TieredStopAtLevel=1"
FOLDER = PROJECT_ROOT / ".jars" / "class-archives"
LIMIT_S = 300
_USE = '-XX:SharedArchiveFile="{}" -Xlog:cds=off -Xlog:cds+dynamic=off'
_MAKE = '-XX:ArchiveClassesAtExit="{}" -Xlog:cds=off -Xlog:cds+dynamic=off'
# The variable with options for every JVM, and the one for the driver of Spark, which overrides it.
VARIABLES = {"kafka": "JDK_JAVA_OPTIONS", "spark": "SPARK_SUBMIT_OPTS"}


def archive(part: str) -> Path:
    """Return the file of the archive of `kafka` or `spark`, for the Java and the jars of this machine."""
    release = find_java().resolve().parent.parent / "release"
    names = [release.read_text(), str(PROJECT_ROOT), *(jar.name for jar in jar_files(part))]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return FOLDER / f"{part}-{digest[:16]}.jsa"


def use_archives() -> bool:
    """Let all JVMs that are started from now on use the archives. Returns whether both exist."""
    if not FOLDER.is_dir():
        return False
    files = {part: archive(part) for part in VARIABLES}
    if not all(file.exists() for file in files.values()):
        return False
    for part, variable in VARIABLES.items():
        os.environ[variable] = f"{QUICK_JVM} {_USE.format(files[part])}"
    return True


def make_archives(folder: Path) -> None:
    """Run Kafka and the streams of Spark below `folder` once, and keep the classes that they load."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = {part: FOLDER / f"{archive(part).name}.{os.getpid()}" for part in VARIABLES}
    os.environ["JDK_JAVA_OPTIONS"] = f"{QUICK_JVM} {_MAKE.format(made['kafka'])}"
    kafka = make_kafka(folder / "kafka")
    kafka.start()
    os.environ["JDK_JAVA_OPTIONS"] = QUICK_JVM
    os.environ["SPARK_SUBMIT_OPTS"] = _MAKE.format(made["spark"])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    options = ["--properties-file", str(PROJECT_ROOT / "conf" / "spark-defaults.conf"), "--master", "local[2]"]
    options += ["--driver-class-path", class_path(), "--conf", f"spark.local.dir={folder}", "pyspark-shell"]
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join(options)
    settings = Settings(data_dir=folder / "data", kafka=kafka_at(kafka.port))
    keyring = ensure_keyring(settings)
    make_topic(settings)
    streams = ProgramProcess("jobs.run_streams", settings, folder, "streams")
    try:
        append_all(settings, [registration("0badcafe", keyring), event("0badcafe", 1, "started")])
        ledger = Path(settings.table_path(LEDGER))
        wait_until(lambda: any(ledger.glob("*.parquet")), LIMIT_S, "the first rows of the ledger")
        time.sleep(2)  # the views follow
    finally:
        streams.stop(timeout_s=LIMIT_S)
        kafka.stop()
    for part, file in made.items():
        wait_until(file.exists, LIMIT_S, f"the archive of {part}")
        file.rename(archive(part))


if __name__ == "__main__":
    if not use_archives():
        with tempfile.TemporaryDirectory(prefix="trunkline-classes.") as name:
            make_archives(Path(name))
