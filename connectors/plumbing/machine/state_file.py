"""The files in `data_dir/run` through which `up`, `status` and `down` communicate with the stack's supervisor.

The state file `stack.state` has two slots of fixed size. Their blocks are allocated when the file is made. A
new state overwrites the older slot, so it needs no room on a full disk, and a reader meanwhile finds the
other slot complete. A slot is one line: a checksum, and JSON with the state and its number.

A request for more parts is a file `add-*.json`, from `trunkline up` to the supervisor.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from schemas.settings.settings import Settings
from trunkline_agent.private_files import replace_file

_SLOT_BYTES = 256 * 1024
_SLOTS = 2
_READ_ATTEMPTS = 3
# The phases of a stack.
STARTING, RUNNING, STOPPING, FAILED = "starting", "running", "stopping", "failed"
# The states of a part, which is `STARTING` first.
STOPPED, READY, WAITING, UNRESPONSIVE = "stopped", "ready", "waiting", "unresponsive"

# After so many failures in a row no caller waits for a part any more. The supervisor goes on starting it.
GIVE_UP_AFTER = 3


def is_settled(parts: dict[str, Any], name: str) -> bool:
    """Return whether a caller may stop waiting for a part of the stack to become ready.

    True if the part is or was ready, or has failed three times in a row. For a part that waits for another
    part, the state of the other part decides.

    Args:
        parts: The entries of all parts in the state file, by name.
        name: The part.
    """
    part = parts[name]
    if part["state"] in (READY, UNRESPONSIVE) or part["failures"] >= GIVE_UP_AFTER:
        return True
    return part["waits_for"] is not None and is_settled(parts, part["waits_for"])


def state_path(settings: Settings) -> Path:
    """Return the path of the state file of the stack with this data directory, whether it exists or not."""
    return settings.data_path / "run" / "stack.state"


def write_state(settings: Settings, state: dict[str, Any]) -> None:
    """Write the stack's state to the state file. Only the supervisor calls this.

    The file has the two newest states. `state` replaces the older one, so that a reader always finds a complete
    one.

    Raises:
        OSError: The disk has no room to make the file, or the state is too large for it.
    """
    path = state_path(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = [-1 if slot is None else slot[0] for slot in _slots(path)]
    oldest = numbers.index(min(numbers))
    text = json.dumps({"number": max(numbers) + 1, "state": state}).encode()
    line = b"%08x %s" % (zlib.crc32(text), text)
    if len(line) >= _SLOT_BYTES:
        raise OSError(errno.EFBIG, "the state is too large for its file", str(path))
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < _SLOTS * _SLOT_BYTES:
            os.posix_fallocate(file.fileno(), 0, _SLOTS * _SLOT_BYTES)
        os.pwrite(file.fileno(), line.ljust(_SLOT_BYTES - 1) + b"\n", oldest * _SLOT_BYTES)


def _slots(path: Path) -> list[tuple[int, dict[str, Any]] | None]:
    """Return the number and the state in each slot, None for one that is empty or only half written."""
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    return [_slot(data[at : at + _SLOT_BYTES]) for at in range(0, _SLOTS * _SLOT_BYTES, _SLOT_BYTES)]


def _slot(line: bytes) -> tuple[int, dict[str, Any]] | None:
    checksum, _, text = line.rstrip().partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        found = json.loads(text)
        return found["number"], found["state"]
    except (ValueError, KeyError, TypeError):
        return None


def read_state(settings: Settings) -> dict[str, Any] | None:
    """Return the newest state in the state file, or None if there is none.

    The stack may have been killed since. `is_alive` checks its supervisor.
    """
    for _ in range(_READ_ATTEMPTS):
        whole = [slot for slot in _slots(state_path(settings)) if slot is not None]
        if whole:
            return max(whole, key=lambda slot: slot[0])[1]
        if not state_path(settings).exists():
            return None
        # Both slots were overwritten during the read.
    return None


def remove_state(settings: Settings) -> None:
    """Delete the state file, if it exists. `down` and the end of the supervisor do this."""
    state_path(settings).unlink(missing_ok=True)


def identity(pid: int | None = None) -> dict[str, Any]:
    """Return a process's id and start time for the state file. `is_alive` recognises the process by them.

    A later process may get the same id, but not the same start time. `pid` None means this process. If there is
    no process with this id, psutil.NoSuchProcess is raised.
    """
    process = psutil.Process(pid or os.getpid())
    return {"pid": process.pid, "created": process.create_time()}


def is_alive(named: dict[str, Any] | None) -> bool:
    """Return whether the process that `identity` described still runs.

    Args:
        named: The result of `identity`, or None for no process, which does not run.
    """
    if not named or not named.get("pid"):
        return False
    try:
        process = psutil.Process(named["pid"])
        same = abs(process.create_time() - named["created"]) < 0.01
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def requested(settings: Settings, names: Iterable[str]) -> Iterator[None]:
    """Ask the running supervisor to start the named parts, in a `with` block.

    The caller waits for the parts in the block. The request is a file, which the supervisor deletes when it has
    read it. At the end of the block, an unread file is deleted, and the parts are not started.
    """
    file = state_path(settings).with_name(f"add-{secrets.token_hex(8)}.json")
    replace_file(file, json.dumps(sorted(names)).encode())
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def take_requests(settings: Settings) -> set[str]:
    """Return the names of the parts that `requested` asked for, and delete these request files.

    Files that are no valid request are deleted, too. Only the supervisor calls this.
    """
    found: set[str] = set()
    for file in state_path(settings).parent.glob("add-*.json"):
        try:
            names = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            continue
        except ValueError:
            names = None
        file.unlink(missing_ok=True)
        if isinstance(names, list):
            found |= {name for name in names if isinstance(name, str)}
    return found
