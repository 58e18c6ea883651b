"""The state file: whole at each moment, and true on a full disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.plumbing.machine import state_file
from connectors.programs.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.programs import run_program

SLOT = 256 * 1024

# A stack with Mosquitto on a disk that is filled to its last byte; then Mosquitto is killed.
FULL_DISK = """
import json, os, sys, time
from pathlib import Path
from connectors.programs.local_stack import LocalStack, control
from schemas.settings.settings import MqttSettings, Settings

root = Path(sys.argv[1])
settings = Settings(data_dir=root / "data", mqtt=MqttSettings(port=int(sys.argv[2])))
with LocalStack(settings, ("mosquitto",)) as stack:
    part = stack["mosquitto"]
    with (root / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 512)
        except OSError:
            pass
    part.kill()
    seen = []
    deadline = time.monotonic() + 20
    while not (part.is_ready and part.restarts) and time.monotonic() < deadline:
        stack.look_after()
        shown = {one.name: one for one in control.part_statuses(settings)}["mosquitto"]
        seen.append((shown.state, shown.restarts, shown.pid) == (part.state, part.restarts, part.pid))
        time.sleep(0.05)
    files = sorted(os.listdir(root / "data/run"))
    said = {"restarts": part.restarts, "seen": sorted(set(seen)), "files": files}
    print(json.dumps(said), file=sys.stderr)
    (root / "filler").unlink()
"""
MOUNT = 'mkdir -p "$1" && mount -t tmpfs -o size=3m tmpfs "$1" && shift && exec "$@"'


def test_the_newer_of_two_states_is_read_and_a_half_written_one_is_not(tmp_path: Path):
    settings = Settings(data_dir=tmp_path)
    assert state_file.read_state(settings) is None
    for number in range(5):
        state_file.write_state(settings, {"phase": str(number)})
        assert state_file.read_state(settings) == {"phase": str(number)}
    path = state_file.state_path(settings)
    assert path.stat().st_size == 2 * SLOT
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("r+b") as file:
        file.seek(15)  # the first slot has the newest: five were written
        file.write(b"torn")
    assert state_file.read_state(settings) == {"phase": "3"}
    state_file.write_state(settings, {"phase": "5"})
    assert state_file.read_state(settings) == {"phase": "5"}
    with pytest.raises(OSError, match="too large"):
        state_file.write_state(settings, {"phase": "x" * SLOT})
    assert state_file.read_state(settings) == {"phase": "5"}


@pytest.mark.requirement("OP-07")
def test_a_state_is_written_where_no_file_may_grow(tmp_path: Path):
    settings = Settings(data_dir=tmp_path)
    state_file.write_state(settings, {"phase": "starting"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * SLOT, before[1]))
    try:
        for number in range(3):
            state_file.write_state(settings, {"phase": str(number)})
            assert state_file.read_state(settings) == {"phase": str(number)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.requirement("OP-07")
@pytest.mark.stack
def test_status_is_true_on_a_full_disk(tmp_path: Path):
    # A mount of its own in a namespace of its own: it ends with the process.
    command = ["unshare", "--mount", "bash", "-c", MOUNT, "bash", str(tmp_path / "disk")]
    may_mount = (
        shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode
    )
    if not may_mount:  # without root: no file of the process may grow further than the state file
        command = ["bash", "-c", 'mkdir -p "$1" && ulimit -f 512 && shift && exec "$@"', *command[5:]]
    done = run_program(
        [*command, sys.executable, "-P", "-c", FULL_DISK, str(tmp_path / "disk"), str(free_port())],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stderr.splitlines()[-1])
    assert said["restarts"] == 1
    assert said["seen"] == [True], "each look at the status shows the part as it is"
    assert said["files"] == ["stack.lock", "stack.state"]
