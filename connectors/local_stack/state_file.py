"""A stack's state file, `data_dir/run/stack.state`: how `status` and `down` see what another process runs.

The file has two slots of fixed size, whose blocks are allocated when it is made. A new state is written over
the older one, so it needs no room on a full disk, and a reader finds the other one whole while it is written. A
slot is one line: a checksum, and JSON with the state's number.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path
from typing import Any

import psutil

from schemas.settings.settings import Settings

_SLOT_BYTES = 256 * 1024
_SLOTS = 2
_READ_ATTEMPTS = 3
STARTING, RUNNING, STOPPING, FAILED = "starting", "running", "stopping", "failed"


# A part that has failed so often in a row is waited for no longer, though it is started again.
GIVE_UP_AFTER = 3


def is_settled(parts: dict[str, Any], name: str) -> bool:
    """Whether nobody needs to wait for this part of a state any longer: it is ready or was, or has failed a few
    times in a row, or the part that it waits for has.
    """
    part = parts[name]
    if part["state"] in ("ready", "unresponsive") or part["failures"] >= GIVE_UP_AFTER:
        return True
    return part["waits_for"] is not None and is_settled(parts, part["waits_for"])


def state_path(settings: Settings) -> Path:
    """Where the state file of these settings' stack is."""
    return settings.data_path / "run" / "stack.state"


def write_state(settings: Settings, state: dict[str, Any]) -> None:
    """Write the state over the older one of the two that the file holds. Raises OSError when there is no room
    to make the file, or the state is too large for it.
    """
    path = state_path(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = [-1 if slot is None else slot[0] for slot in _slots(path)]
    oldest = numbers.index(min(numbers))
    text = json.dumps({"number": max(numbers) + 1, "state": state}).encode()
    line = b"%08x %s" % (zlib.crc32(text), text)
    if len(line) >= _SLOT_BYTES:
        raise OSError(errno.EFBIG, "the state is too large for its file", str(path))
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(file).st_size < _SLOTS * _SLOT_BYTES:
            os.posix_fallocate(file, 0, _SLOTS * _SLOT_BYTES)
        os.pwrite(file, line.ljust(_SLOT_BYTES - 1) + b"\n", oldest * _SLOT_BYTES)
    finally:
        os.close(file)


def _slots(path: Path) -> list[tuple[int, dict[str, Any]] | None]:
    """The number and the state of each slot; None for one that is empty or only half written."""
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
    """Return the state as written last, or None. It may be of a stack that was killed: see `is_alive`."""
    for _ in range(_READ_ATTEMPTS):
        whole = [slot for slot in _slots(state_path(settings)) if slot is not None]
        if whole:
            return max(whole, key=lambda slot: slot[0])[1]
        if not state_path(settings).exists():
            return None
        # Both were written while they were read.
    return None


def remove_state(settings: Settings) -> None:
    """Forget the stack."""
    state_path(settings).unlink(missing_ok=True)


def identity(pid: int | None = None) -> dict[str, Any]:
    """A process named so that a later one with the same id is not mistaken for it."""
    process = psutil.Process(pid or os.getpid())
    return {"pid": process.pid, "created": process.create_time()}


def is_alive(named: dict[str, Any] | None) -> bool:
    """Whether the process of this identity still runs."""
    if not named or not named.get("pid"):
        return False
    try:
        process = psutil.Process(named["pid"])
        same = abs(process.create_time() - named["created"]) < 0.01
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
