"""The offsets up to which Spark had planned to settle the log, by the checkpoint of the settling query."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson

from schemas.errors import TrunklineError
from schemas.settings.settings import Settings

_QUERY: Final = "settle_events"


def _folder(settings: Settings) -> Path | None:
    """Return the folder of the checkpoint; None on an object store."""
    root = settings.checkpoints_root.removeprefix("file:")
    return None if "://" in root else Path(root) / _QUERY


def planned_ends(settings: Settings) -> dict[int, int] | None:
    """Return the end of the newest planned micro-batch, by partition: the log had all records before it.

    None if there is no checkpoint on a local disk, or its newest plan cannot be read.
    """
    folder = _folder(settings)
    if folder is None or not (folder / "offsets").is_dir():
        return None
    batches = [file for file in (folder / "offsets").iterdir() if file.name.isdigit()]
    if not batches:
        return None
    newest = max(batches, key=lambda file: int(file.name))
    try:
        # Spark's offset log has its version, the settings of the micro-batch, and a line for each source.
        source = orjson.loads(newest.read_text(encoding="utf-8").splitlines()[2])
        return {int(number): int(end) for number, end in source[settings.kafka.topic].items()}
    except (OSError, ValueError, LookupError, AttributeError):
        return None


def set_aside(settings: Settings) -> Path:
    """Rename the checkpoint, so that `streams` makes a new one from the tables; return its new place.

    Raises TrunklineError.
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
