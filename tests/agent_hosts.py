"""Fresh virtual environments with the wheel of the agents' library, as on a machine without this checkout.

Nothing comes over the network: the libraries that the wheel requires are packed again as `.venv` has them, and
the set-up has checked those against the hashes of the lock file.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MINORS = (11, 12, 13, 14)
RUNS = 7
COMMAND_S = 120
# The libraries of the core and of the extra mqtt.
LIBRARIES = ("h11", "paho-mqtt")
_OF_THE_INSTALLER = {"INSTALLER", "REQUESTED", "direct_url.json"}
_WHO = "import ssl, sys, venv; print(*sys.version_info[:2])"
AGENT = "from trunkline_agent import Agent"
# Something that each Python has, and whose import costs about half of the agent's.
YARDSTICK = "import asyncio"
_IMPORT_TIMES = """\
import json, time
wall, cpu = time.perf_counter(), time.process_time()
{}
print(json.dumps([(time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000]))
"""


def _candidates(minor: int) -> list[str]:
    """Interpreters that may be Python 3.`minor`, the one of the tests first."""
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [*sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python"), reverse=True)]
    return [sys._base_executable, *map(str, found), shutil.which(name) or name, f"/usr/bin/{name}"]


@functools.cache
def pythons() -> dict[str, str]:
    """The Pythons 3.11 to 3.14 of this machine: version and interpreter. That of the tests is one of them."""
    found = {}
    for minor in MINORS:
        for candidate in _candidates(minor):
            try:
                done = subprocess.run(
                    [candidate, "-I", "-c", _WHO], capture_output=True, text=True, timeout=COMMAND_S
                )
            except OSError:
                continue
            if done.stdout.split() == ["3", str(minor)]:
                found[f"3.{minor}"] = candidate
                break
    return found


def packed_again(library: str, folder: Path) -> Path:
    """Pack an installed library without binaries into a wheel."""
    known = importlib.metadata.distribution(library)
    name = f"{library.replace('-', '_')}-{known.version}"
    target = folder / f"{name}-py3-none-any.whl"
    rows = io.StringIO()
    with zipfile.ZipFile(target, "w") as wheel:
        for file in known.files or ():
            if file.suffix == ".pyc" or file.name in _OF_THE_INSTALLER or file.name == "RECORD":
                continue
            assert file.suffix != ".so" and ".." not in file.parts, file
            wheel.writestr(str(file), file.read_binary())
            csv.writer(rows, lineterminator="\n").writerow([str(file), "", ""])
        wheel.writestr(f"{name}.dist-info/RECORD", rows.getvalue())
    return target


@functools.cache
def pack_libraries(folder: Path) -> Path:
    """Pack the libraries of the core and of the extra mqtt into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        packed_again(library, folder)
    return folder


@dataclass(frozen=True)
class AgentHost:
    """A virtual environment in which the wheel is installed, with nothing but what the wheel requires."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The folder of the installed packages."""
        (found,) = self.folder.glob("lib/python3.*/site-packages")
        return found

    def installed_bytes(self) -> int:
        """The size of all installed files, with the bytecode that pip makes."""
        return sum(file.stat().st_size for file in self.packages.rglob("*") if file.is_file())

    def run(self, code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python code in it, far from the checkout."""
        command = [self.python, "-I", "-c", code, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=bare(), capture_output=True, text=True, timeout=COMMAND_S, **options
        )

    def import_ms(self, runs: int = RUNS, code: str = AGENT) -> tuple[float, float]:
        """The medians of what an import takes, by default that of the agent: wall and processor time."""
        times = []
        for _ in range(runs):
            done = self.run(_IMPORT_TIMES.format(code))
            assert done.returncode == 0, done.stderr
            times.append(json.loads(done.stdout))
        wall, cpu = zip(*times, strict=True)
        return statistics.median(wall), statistics.median(cpu)


def bare() -> dict[str, str]:
    """The environment of a machine that knows nothing of the checkout."""
    return {"PATH": os.defpath, "LANG": "C.UTF-8"}


def make_host(python: str, folder: Path, wheel: Path, extras: Sequence[str] = ()) -> AgentHost:
    """Make a virtual environment below `folder` and install the wheel with pip, from files alone.

    Args:
        python: The interpreter.
        folder: The folder of the environment; the packed libraries are beside it.
        wheel: The wheel.
        extras: The extras to install; `mqtt` is the only one whose libraries are packed.
    """
    host = AgentHost(folder)
    libraries = pack_libraries(folder.parent / "libraries")
    _run([python, "-I", "-m", "venv", "--without-pip", folder])
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    pip = [sys.executable, "-I", "-m", "pip", "--python", host.python, "--isolated", "--quiet"]
    _run([*pip, "install", "--no-index", "--no-cache-dir", "--find-links", libraries, wanted])
    return host


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
