"""The two commands of the README on each Python and each Java of this machine, in a fresh checkout per Python.

That takes half an hour. `docs/reference/machines.md` has the results.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.programs.local_stack.java_programs import FOLDERS, JAVA_MAJORS, java_version
from schemas.settings.settings import PROJECT_ROOT
from tests.agent_hosts import pythons
from tests.odd_places import GID, ODD_NAME, UID

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.spark, pytest.mark.requirement("OP-47")]

SET_UP_S, DEMO_S, TEST_S = 1200, 600, 600
# One test of Kafka, Spark and the clients, and one of Mosquitto.
SHORT = ("tests/jobs/test_header_readers.py", "tests/connectors/plumbing/mqtt_link/test_broker_figures.py")
BROKER_FREE = "tests/connectors/doors/mqtt_bridge/test_publish_counts.py"
OWN_PYTHON = "/usr/bin/python3.11"  # one that each user can run


def javas() -> dict[int, Path]:
    """The home of a Java of each version that serves and that this machine has."""
    found = {}
    for folder in FOLDERS:
        for java in sorted(Path(folder).glob("*/bin/java")):
            major = int((java_version(java) or "0").split(".")[0])
            if major in JAVA_MAJORS:
                found.setdefault(major, java.parent.parent)
    return found


def checkout(folder: Path) -> Path:
    """A clone of what is committed, without `.venv` and `.jars`."""
    subprocess.run(["git", "clone", "--quiet", PROJECT_ROOT, folder], check=True)
    return folder


def run(checkout: Path, *arguments: str, within_s: int, uid: int | None = None, **environment: str) -> None:
    """Run the wrapper of a checkout to its end, which must be a success."""
    known = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRUNKLINE_", "PYTHON", "PYTEST", "PYSPARK", "SPARK", "JDK_", "JAVA_"))
    }
    if uid is not None:
        for name in ("HOME", "USER", "LOGNAME"):
            known.pop(name, None)
    known |= {"TRUNKLINE_CONF": os.devnull, **environment}
    done = subprocess.run(
        [checkout / "trunkline", *arguments],
        cwd=checkout,
        env=known,
        capture_output=True,
        text=True,
        timeout=within_s,
        user=uid,
        group=None if uid is None else GID,
        extra_groups=None if uid is None else [],
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter."""
    found = Path(tempfile.mkdtemp(prefix="trunkline-machine-"))
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


@pytest.mark.timeout(SET_UP_S + 3 * (DEMO_S + TEST_S))
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_both_commands_work_with_each_python_and_java(version: str, folder: Path) -> None:
    interpreter = pythons().get(version)
    if interpreter is None:
        assert version != "3.11", "the Python of the tests is here"
        return
    clone = checkout(folder / "checkout")
    for home in javas().values():
        variables = {"TRUNKLINE_PYTHON": interpreter, "JAVA_HOME": str(home)}
        data = folder / home.name
        run(clone, "demo", "--data-dir", str(data), within_s=SET_UP_S + DEMO_S, **variables)
        run(clone, "test", *SHORT, "-q", "-x", within_s=TEST_S, **variables)
    assert (clone / ".venv" / "bin" / f"python{version}").exists()


@pytest.mark.timeout(SET_UP_S + DEMO_S + TEST_S)
def test_both_commands_work_for_a_user_without_a_name_a_home_and_a_plain_folder(folder: Path) -> None:
    clone = checkout(folder / "größe a")
    is_root = os.geteuid() == 0
    if is_root:
        subprocess.run(["chown", "-R", f"{UID}:{GID}", folder], check=True)
    variables = {"TRUNKLINE_PYTHON": OWN_PYTHON, "LC_ALL": "C", "TZ": "Pacific/Chatham"}
    uid = UID if is_root else None
    data = str(folder / ODD_NAME)
    run(clone, "demo", "--data-dir", data, within_s=SET_UP_S + DEMO_S, uid=uid, **variables)
    # The tests' own brokers and Spark sessions do not start for such a user; the stack's do.
    run(clone, "test", BROKER_FREE, "-q", "-x", within_s=TEST_S, uid=uid, **variables)
