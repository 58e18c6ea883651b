"""A bug planted in the fold of a Spark worker: events whose detail says so make it raise."""

from __future__ import annotations

from pathlib import Path

from jobs.settle_events import worker_keyring
from schemas.fold.settled import Outcome
from schemas.fold.stream_kind import FoldInput
from schemas.keys.sealing import Keyring
from schemas.streams.fold import KINDS
from trunkline_agent.wire.ids import JOB

TRIGGER = "planted bug"
_real = KINDS[JOB]


def _buggy(given: FoldInput) -> Outcome:
    if given.body.get("detail") == TRIGGER:
        raise ZeroDivisionError
    return _real.settle(given)


def keyring_with_a_bug(key_file: Path) -> Keyring:
    """Plants the bug in the worker that asks for its keyring."""
    KINDS[JOB] = _real._replace(settle=_buggy)
    return worker_keyring(key_file)
