"""What a query's checkpoint is worth: there, lost, begun and not used, or damaged.

Spark writes `metadata` (the query's id) once, when the checkpoint is made, then for each micro-batch a file
in `offsets` before it and one in `commits` after it, each of them atomically. So a crash leaves few pictures,
and every other one comes from outside. Works through Hadoop's file systems: the checkpoint may be a URI.
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
    """The checkpoint cannot be used and was not lost as a whole. The message names the directory."""


class Checkpoint(NamedTuple):
    """What was found. `query_id` None: there is no checkpoint, or only what a query wrote after its checkpoint
    was deleted. `last_batch` None: no micro-batch was ever finished in it.
    """

    path: str
    has_files: bool
    query_id: str | None
    last_batch: int | None


class CheckpointFolder:
    """The directory of a checkpoint, on whatever file system it is."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm: Any = spark._jvm
        self.path = path
        self._new_path = jvm.org.apache.hadoop.fs.Path
        self._files = self._new_path(path).getFileSystem(spark._jsc.hadoopConfiguration())
        self._read = jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray

    def look(self) -> Checkpoint:
        """What the checkpoint is worth. Raises CheckpointDamaged."""
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
            raise self._damaged(f"its folder {'commits' if offsets else 'offsets'} is empty or gone")
        last = max(commits)
        if last not in offsets or max(offsets) > last + 1:
            raise self._damaged(f"it began micro-batch {max(offsets)} and finished {last}")
        for name in (f"offsets/{last}", f"offsets/{max(offsets)}", f"commits/{last}"):
            if not self._text(name).startswith("v"):
                raise self._damaged(f"its file {name} cannot be read")
        if not self._names("state/0"):
            raise self._damaged("its folder state is empty or gone")
        return Checkpoint(self.path, True, query_id, last)

    def discard(self) -> None:
        """Delete it. What is left when that is interrupted counts as no checkpoint."""
        # Without `metadata` the rest is worth nothing, so that goes first.
        self._files.delete(self._at("metadata"), False)
        self._files.delete(self._new_path(self.path), True)

    def _at(self, name: str) -> Any:
        return self._new_path(f"{self.path}/{name}" if name else self.path)

    def _names(self, name: str) -> set[str]:
        folder = self._at(name)
        if not self._files.exists(folder):
            return set()
        names = {str(status.getPath().getName()) for status in self._files.listStatus(folder)}
        # Temporary files and checksums of Hadoop's.
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
            # Also where the bytes do not fit their checksum.
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
    """Stops a query whose checkpoint was deleted under it: what it writes there is lost, and the sooner it
    starts anew the better. Called in each micro-batch; on a local disk that is one look at a file. On an
    object store it asks nothing: there the next start finds out.
    """

    def __init__(self, path: str) -> None:
        plain = path.removeprefix("file:")
        self._path = path
        self._metadata = None if "://" in plain else Path(plain) / "metadata"

    def __call__(self) -> None:
        """Raise CheckpointDamaged when the checkpoint is gone."""
        if self._metadata is not None and not self._metadata.exists():
            raise CheckpointDamaged(
                f"the checkpoint {self._path} was deleted under the running query; started again, the job goes "
                "on from the tables"
            )
