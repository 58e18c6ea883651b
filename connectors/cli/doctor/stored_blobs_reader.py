"""Reads the objects of stored blobs from the view `blobs`, without Spark."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

from schemas.settings.settings import Settings
from schemas.streams.blob.blob_registry import BLOBS, STORED
from schemas.tables.delta_files import dataset_of


def stored_objects(settings: Settings) -> dict[str, int] | None:
    """Return the objects of all stored blobs with their lengths in bytes, by the view `blobs`.

    The result is None if the view is in an object store, or does not exist yet. Raises OSError if it is
    unreadable.
    """
    path = settings.table_path(BLOBS)
    if "://" in path or not Path(path, "_delta_log").is_dir():
        return None
    rows = dataset_of(DeltaTable(path)).to_table(columns=["status", "object", "bytes"]).to_pylist()
    return {row["object"]: row["bytes"] for row in rows if row["status"] == STORED}
