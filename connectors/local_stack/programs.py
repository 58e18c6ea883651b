"""Finds the installed external programs: Java 17, Mosquitto, Spark, and the jars of Kafka and Spark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import TrunklineError

JARS = PROJECT_ROOT / ".jars"
JAVA_MAJOR = "17"
_SET_UP = "run ./trunkline doctor in the checkout, which sets up what is missing"


def java_version(java: Path) -> str | None:
    """Return the version of the Java program at this path, such as `17.0.9`, or None if it is not Java."""
    # The file `release` has the version, so no JVM needs to start.
    release = java.resolve().parent.parent / "release"
    if release.is_file():
        found = re.search(r'^JAVA_VERSION="([^"]+)"', release.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found.group(1)
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20)  # noqa: S603 found by us
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "([^"]+)"', answer.stderr)
    return found.group(1) if found else None


def find_java() -> Path:
    """Return the path of a Java 17 program, from JAVA_HOME, from PATH, or from Debian's folder.

    Raises:
        TrunklineError: There is none.
    """
    known = [Path(home) / "bin" / "java" for home in [os.environ.get("JAVA_HOME")] if home]
    known += [Path(found) for found in [shutil.which("java")] if found]
    for java in [*known, *sorted(Path("/usr/lib/jvm").glob("*17*/bin/java"))]:
        if java.is_file() and (java_version(java) or "").split(".")[0] == JAVA_MAJOR:
            return java
    raise TrunklineError("no Java 17 found: sudo apt-get install -y openjdk-17-jre-headless, or set JAVA_HOME")


def java_home() -> Path:
    """Return the folder of the Java 17 that `find_java` finds, for programs that need JAVA_HOME.

    Raises:
        TrunklineError: There is none.
    """
    return find_java().resolve().parent.parent


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

    `part` is `kafka` or `spark`.

    Raises:
        TrunklineError: There are none.
    """
    found = sorted((JARS / part).glob("*.jar"))
    if not found:
        raise TrunklineError(f"no jars in .jars/{part}: {_SET_UP}")
    return found
