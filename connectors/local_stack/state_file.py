"""A stack's state file, `data_dir/run/stack.json`: how `status` and `down` see what another process runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

from schemas.settings import Settings

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
    return settings.data_path / "run" / "stack.json"


def write_state(settings: Settings, state: dict[str, Any]) -> None:
    """Replace the state file in one step, so that a reader never sees half of it."""
    path = state_path(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def read_state(settings: Settings) -> dict[str, Any] | None:
    """The state as written last, or None. It may be of a stack that was killed: see `is_alive`."""
    try:
        found = json.loads(state_path(settings).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


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
