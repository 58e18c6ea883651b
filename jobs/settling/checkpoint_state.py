"""Finds out whether a Spark query's checkpoint is usable, lost, not used yet, or damaged.

Spark writes `metadata` (the query's id) once, when it makes the checkpoint. For each micro-batch it writes a
file in `offsets` before it and one in `commits` after it, each of them atomically. So a crash can leave only a
few states, and any other state has another cause. The module uses Hadoop's file systems, so the checkpoint may
be a URI.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from schemas.errors import TrunklineError

_OURS: Final = {"metadata", "offsets", "commits", "sources", "state"}


class CheckpointDamaged(TrunklineError):
    """The checkpoint cannot be used, but some of its files exist. The message names the directory."""


class Checkpoint(NamedTuple):
    """The state of a checkpoint's directory.

    Attributes:
        path: The directory.
        has_files: Whether there are any files.
        query_id: The query's id. None: there is no checkpoint, or only files that were written after its
            deletion.
        last_batch: The number of the last finished micro-batch. None: no micro-batch was ever finished.
    """

    path: str
    has_files: bool
    query_id: str | None
    last_batch: int | None


class CheckpointFolder:
    """The directory of a Spark checkpoint, on any file system that Hadoop supports."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm: Any = spark._jvm
        self.path = path
        self._new_path = jvm.org.apache.hadoop.fs.Path
        self._files = self._new_path(path).getFileSystem(spark._jsc.hadoopConfiguration())
        self._read = jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray

    def look(self) -> Checkpoint:
        """Read the files of a query's checkpoint, and return its state. Nothing is changed.

        Raises:
            CheckpointDamaged: Files are missing, unreadable or unknown.
        """
        names = self._names("")
        if not names:
            return Checkpoint(self.path, False, None, None)
        if names - _OURS:
            raise self._damaged(f"it holds what no query wrote: {', '.join(sorted(names - _OURS))}")
        if "metadata" not in names:
            return Checkpoint(self.path, True, None, None)
        query_id = self._query_id()
        offsets, commits = self._batches("offsets"), self._batches("commits")
        if not commits and offsets <= {0}:
            return Checkpoint(self.path, True, query_id, None)
        if not offsets or not commits:
            raise self._damaged(f"its folder {'commits' if offsets else 'offsets'} is empty or missing")
        last = max(commits)
        if last not in offsets or max(offsets) > last + 1:
            raise self._damaged(f"it began micro-batch {max(offsets)} and finished {last}")
        for name in (f"offsets/{last}", f"offsets/{max(offsets)}", f"commits/{last}"):
            if not self._text(name).startswith("v"):
                raise self._damaged(f"its file {name} cannot be read")
        if not self._names("state/0"):
            raise self._damaged("its folder state is empty or missing")
        return Checkpoint(self.path, True, query_id, last)

    def discard(self) -> None:
        """Delete the directory of a query's checkpoint.

        If this is interrupted, the remaining files count as no checkpoint.
        """
        # Without `metadata` the rest is no checkpoint, so it is deleted first.
        self._files.delete(self._at("metadata"), False)
        self._files.delete(self._new_path(self.path), True)

    def _at(self, name: str) -> Any:
        return self._new_path(f"{self.path}/{name}" if name else self.path)

    def _names(self, name: str) -> set[str]:
        folder = self._at(name)
        if not self._files.exists(folder):
            return set()
        names = {str(status.getPath().getName()) for status in self._files.listStatus(folder)}
        # Skip Hadoop's temporary files and checksums.
        return {name for name in names if not name.startswith(".")}

    def _batches(self, name: str) -> set[int]:
        return {int(number) for number in self._names(name) if number.isdigit()}

    def _text(self, name: str) -> str:
        try:
            stream = self._files.open(self._at(name))
            try:
                return bytes(self._read(stream)).decode("utf-8", "replace")
            finally:
                stream.close()
        except Py4JJavaError:
            # Also raised if the bytes do not match their checksum.
            raise self._damaged(f"its file {name} cannot be read") from None

    def _query_id(self) -> str:
        try:
            return str(json.loads(self._text("metadata"))["id"])
        except (ValueError, KeyError, TypeError):
            raise self._damaged("its file metadata cannot be read") from None

    def _damaged(self, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"the checkpoint {self.path} is damaged: {what}. Nothing was changed. Delete that directory and "
            "start again: the job then goes on from the tables."
        )


class CheckpointGuard:
    """A callable that raises CheckpointDamaged if the running query's checkpoint was deleted.

    The sink calls it in each micro-batch, because a query that goes on would lose its progress. On a local disk
    it looks at one file. On an object store it does nothing, and the next start detects the deletion.
    """

    def __init__(self, path: str) -> None:
        plain = path.removeprefix("file:")
        self._path = path
        self._metadata = None if "://" in plain else Path(plain) / "metadata"

    def __call__(self) -> None:
        """Raise CheckpointDamaged if the checkpoint was deleted."""
        if self._metadata is not None and not self._metadata.exists():
            raise CheckpointDamaged(
                f"the checkpoint {self._path} was deleted under the running query; started again, the job goes "
                "on from the tables"
            )
