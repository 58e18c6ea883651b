"""Finds a Java that Kafka and Spark run on, among all that are installed.

`./trunkline` runs this file by its path before any library is installed, so it imports the standard library and
the library's errors alone. It prints the path of the program.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from trunkline_agent.errors import TrunklineError

# The versions with long-term support that Spark 4.2 and Kafka 4.3 name, newest first.
JAVA_MAJORS: Final = (25, 21, 17)
SERVING: Final = "Java 17, 21 or 25"
# The Java that `./trunkline` installs for users who are not root.
_OWN: Final = Path(__file__).resolve().parents[3] / ".venv" / "java"
# Folders of installed Javas: those of Debian and Fedora, of Java's installer scripts, and of SDKMAN.
FOLDERS: Final = ("/usr/lib/jvm", "/usr/java", "/opt/java", "~/.sdkman/candidates/java")


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


def _major(java: Path) -> int:
    """Return the first number of the version, 0 if the program is not Java."""
    found = re.match(r"\d+", (java.is_file() and java_version(java)) or "")
    return int(found.group()) if found else 0


def _candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the paths at which a Java may be: the user's choice first, then the newest that serves."""
    if home := environment.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environment.get("PATH")):
        yield Path(on_path)
    folders = [Path(os.path.expanduser(folder)) for folder in FOLDERS]  # noqa: PTH111 Path.expanduser needs a home
    installed = [java for folder in folders for java in sorted(folder.glob("*/bin/java"))]
    yield from sorted(installed, key=_major, reverse=True)
    yield _OWN / "bin" / "java"


def passed_over_home() -> str | None:
    """Return why the Java of JAVA_HOME is not used, or None if it is used or the variable is not set."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home or "") / "bin" / "java"
    if not home or _major(java) in JAVA_MAJORS:
        return None
    return f"JAVA_HOME={home} is passed over: it has {_name(java)}, and {SERVING} is needed"


def _name(java: Path) -> str:
    version = java_version(java) if java.is_file() else None
    return f"Java {version}" if version else "no Java that runs"


def find_java() -> Path:
    """Return the path of a Java program of a version that serves.

    That of JAVA_HOME comes first, then that of PATH, then the newest installed one.

    Raises:
        TrunklineError: There is none. The message names those that do not serve.
    """
    others = {}
    for java in _candidates(os.environ):
        if _major(java) in JAVA_MAJORS:
            return java
        if java.is_file():
            others[str(java)] = _name(java)
    found = ", ".join(f"{name} at {path}" for path, name in others.items()) or "none is installed"
    raise TrunklineError(
        f"{SERVING} is not found ({found}): install one, such as `sudo apt-get install default-jre-headless`, "
        "or set JAVA_HOME to its folder"
    )


def java_home() -> Path:
    """Return the folder of the Java that `find_java` finds, for programs that need JAVA_HOME.

    Raises:
        TrunklineError: There is none.
    """
    return find_java().resolve().parent.parent


def main() -> int:
    """Print the path of the Java to use, and on standard error why that of JAVA_HOME is not used."""
    if why := passed_over_home():
        sys.stderr.write(f"      {why}\n")
    try:
        sys.stdout.write(f"{find_java()}\n")
    except TrunklineError as error:
        sys.stderr.write(f"trunkline: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
