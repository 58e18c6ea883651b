"""The settling query's checkpoint as far as others need it: up to where Spark had planned to settle the log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson

from schemas.errors import TrunklineError
from schemas.settings.settings import Settings

_QUERY: Final = "settle_events"


def _folder(settings: Settings) -> Path | None:
    """Where it is; None on an object store."""
    root = settings.checkpoints_root.removeprefix("file:")
    return None if "://" in root else Path(root) / _QUERY


def planned_ends(settings: Settings) -> dict[int, int] | None:
    """By partition, the end of the newest micro-batch that was planned: the log had all records before it. None
    where there is no checkpoint on a local disk, or its newest plan cannot be read.
    """
    folder = _folder(settings)
    if folder is None or not (folder / "offsets").is_dir():
        return None
    batches = [file for file in (folder / "offsets").iterdir() if file.name.isdigit()]
    if not batches:
        return None
    newest = max(batches, key=lambda file: int(file.name))
    try:
        # Spark's offset log: its version, the micro-batch's settings, then a line for each source.
        source = orjson.loads(newest.read_text(encoding="utf-8").splitlines()[2])
        return {int(number): int(end) for number, end in source[settings.kafka.topic].items()}
    except (OSError, ValueError, LookupError, AttributeError):
        return None


def set_aside(settings: Settings) -> Path:
    """Rename the checkpoint, so that `streams` makes a new one of the tables; returns its new place. Raises
    TrunklineError.
    """
    folder = _folder(settings)
    assert folder is not None  # noqa: S101  for the type checker: `planned_ends` has found it
    number = 1
    while (aside := folder.with_name(f"{_QUERY}.before-log-rebuild-{number}")).exists():
        number += 1
    try:
        return folder.rename(aside)
    except OSError as error:
        raise TrunklineError(
            f"the checkpoint {folder} plans records that the log no longer has, and cannot be moved: {error}; "
            "delete that directory before streams starts"
        ) from error
