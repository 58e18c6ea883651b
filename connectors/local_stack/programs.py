"""Where the outside programs are: Java 17, Mosquitto, Spark, and the jars that the wrapper fetched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from schemas.errors import TrunklineError
from schemas.settings.settings import PROJECT_ROOT

JARS = PROJECT_ROOT / ".jars"
JAVA_MAJOR = "17"
_SET_UP = "run ./trunkline doctor in the checkout, which sets up what is missing"


def java_version(java: Path) -> str | None:
    """The version that this Java says it has, or None if it is none."""
    # The file beside it answers without starting a JVM.
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
    """A Java 17: JAVA_HOME's, the path's, or Debian's folder."""
    candidates = []
    if os.environ.get("JAVA_HOME"):
        candidates.append(Path(os.environ["JAVA_HOME"]) / "bin" / "java")
    on_path = shutil.which("java")
    if on_path:
        candidates.append(Path(on_path))
    candidates += sorted(Path("/usr/lib/jvm").glob("*17*/bin/java"))
    for java in candidates:
        if java.is_file() and (java_version(java) or "").split(".")[0] == JAVA_MAJOR:
            return java
    raise TrunklineError("no Java 17 found: sudo apt-get install -y openjdk-17-jre-headless, or set JAVA_HOME")


def java_home() -> Path:
    """The folder of that Java, for programs that want JAVA_HOME."""
    return find_java().resolve().parent.parent


def find_mosquitto() -> Path:
    """Mosquitto; Debian puts it where only root's path looks."""
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if not found:
        raise TrunklineError("Mosquitto is not found: sudo apt-get install -y mosquitto")
    return Path(found)


def spark_home() -> Path:
    """The Spark inside the installed pyspark."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise TrunklineError(f"pyspark is not installed: {_SET_UP}")
    return Path(spec.origin).parent


def jar_files(part: str) -> list[Path]:
    """The jars of `kafka` or `spark`, in the order of their names."""
    found = sorted((JARS / part).glob("*.jar"))
    if not found:
        raise TrunklineError(f"no jars in .jars/{part}: {_SET_UP}")
    return found
