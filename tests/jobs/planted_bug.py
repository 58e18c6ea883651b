"""A bug planted in the fold of a Spark worker: events whose detail says so make it raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schemas.streams.fold
from jobs.settle_events import worker_keyring
from schemas.keys.sealing import Keyring

TRIGGER = "planted bug"
_real = schemas.streams.fold.settle_job


def _buggy(*args: Any) -> Any:
    if args[3].get("detail") == TRIGGER:
        raise ZeroDivisionError
    return _real(*args)


def keyring_with_a_bug(key_file: Path) -> Keyring:
    """Plants the bug in the worker that asks for its keyring."""
    schemas.streams.fold.settle_job = _buggy
    return worker_keyring(key_file)
