"""The files in `data_dir/run` through which `up`, `status` and `down` communicate with a running supervisor.

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

from schemas.keys.private_files import replace_file
from schemas.settings.settings import Settings

_SLOT_BYTES = 256 * 1024
_SLOTS = 2
_READ_ATTEMPTS = 3
STARTING, RUNNING, STOPPING, FAILED = "starting", "running", "stopping", "failed"

# After so many failures in a row no caller waits for a part any more. The supervisor goes on starting it.
GIVE_UP_AFTER = 3


def is_settled(parts: dict[str, Any], name: str) -> bool:
    """Return whether no caller needs to wait for this part of a state any longer.

    The part is ready or was ready, or it or the part that it waits for has failed several times in a row.
    """
    part = parts[name]
    if part["state"] in ("ready", "unresponsive") or part["failures"] >= GIVE_UP_AFTER:
        return True
    return part["waits_for"] is not None and is_settled(parts, part["waits_for"])


def state_path(settings: Settings) -> Path:
    """Return the path of the state file of these settings' stack."""
    return settings.data_path / "run" / "stack.state"


def write_state(settings: Settings, state: dict[str, Any]) -> None:
    """Write the state over the older one of the two that the file has.

    Raises OSError when there is no room to make the file, or the state is too large for it.
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
    """Return the newest state, or None. It may be of a stack that was killed: see `is_alive`."""
    for _ in range(_READ_ATTEMPTS):
        whole = [slot for slot in _slots(state_path(settings)) if slot is not None]
        if whole:
            return max(whole, key=lambda slot: slot[0])[1]
        if not state_path(settings).exists():
            return None
        # Both slots were overwritten during the read.
    return None


def remove_state(settings: Settings) -> None:
    """Remove the state file."""
    state_path(settings).unlink(missing_ok=True)


def identity(pid: int | None = None) -> dict[str, Any]:
    """Return a process's id and start time, so that a later process with this id is not mistaken for it."""
    process = psutil.Process(pid or os.getpid())
    return {"pid": process.pid, "created": process.create_time()}


def is_alive(named: dict[str, Any] | None) -> bool:
    """Return whether the process of this identity still runs."""
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
    """Request these parts from the supervisor. The end of the block withdraws a request that was not read."""
    file = state_path(settings).with_name(f"add-{secrets.token_hex(8)}.json")
    replace_file(file, json.dumps(sorted(names)).encode())
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def take_requests(settings: Settings) -> set[str]:
    """Return the requested parts, and remove the requests. Removes also files that are no valid request."""
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
