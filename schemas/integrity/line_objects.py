"""Lines that only grow, in an object store: those of the audit chain, and those of its anchors.

An object store cannot append to an object. So each append is an object of its own, and none is written over: a
bucket whose objects nobody can change (object lock) serves for anchors. The names sort as the lines do.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Final

from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from schemas.tables.delta_files import reason_of
from trunkline_agent.errors import TrunklineError

_READ_AT_ONCE: Final = 16
_MERGED_FROM: Final = 100


class ObjectLines:
    """The lines in the objects below a URI. Nothing is read or written by the constructor.

    Each method blocks, and raises TrunklineError when the object store does not answer or refuses.

    Args:
        place: The URI, such as `s3://bucket/audit/anchors`. Nothing else is below it.
    """

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")

    def __str__(self) -> str:
        return self.place

    def exists(self) -> bool:
        """Return whether there is a line."""
        return bool(self._names())

    def lines(self) -> Iterator[bytes]:
        """Yield all lines with their line ends, in order. A line that several objects have comes once."""
        seen = set[int]()  # hashes, because there may be very many
        for line in self._lines_of(self._names()):
            if hash(line) not in seen:
                seen.add(hash(line))
                yield line

    def from_end(self) -> Iterator[bytes]:
        """Yield all lines with their line ends, the last one first. Some may come again."""
        for name in reversed(self._names()):
            yield from reversed(list(self._lines_of([name])))

    def append(self, at: int, lines: bytes) -> None:
        """Write whole lines as one object. `at` is the place of the first one, such as a time or a version."""
        try:
            self._store.put(f"{at:020d}-{uuid.uuid4().hex[:12]}.ndjson", lines, mode="create")
        except BaseError as error:
            raise self._trouble(error) from error

    def merge(self) -> None:
        """Join many small objects to one. A crash leaves lines in two objects, and none is lost.

        Call it only if objects may be deleted, and while nobody else merges.
        """
        names = self._names()
        small = [name for name in names if "+" not in name]
        if len(small) < _MERGED_FROM:
            return
        lines = list(dict.fromkeys(self._lines_of(small)))
        at = small[0].partition("-")[0]
        try:
            self._store.put(f"{at}-{uuid.uuid4().hex[:12]}+.ndjson", b"".join(lines), mode="create")
            self._store.delete(small)
        except BaseError as error:
            raise self._trouble(error) from error

    @cached_property
    def _store(self) -> ObjectStore:
        return from_url(self.place)

    def _names(self) -> list[str]:
        try:
            return sorted(file["path"] for page in self._store.list() for file in page)
        except BaseError as error:
            raise self._trouble(error) from error

    def _lines_of(self, names: Sequence[str]) -> Iterator[bytes]:
        def read(name: str) -> bytes:
            return bytes(self._store.get(name).bytes())

        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            for first in range(0, len(names), 10 * _READ_AT_ONCE):
                try:
                    contents = list(threads.map(read, names[first : first + 10 * _READ_AT_ONCE]))
                except (BaseError, FileNotFoundError) as error:
                    raise self._trouble(error) from error
                for content in contents:
                    yield from content.splitlines(keepends=True)

    def _trouble(self, error: Exception) -> TrunklineError:
        return TrunklineError(f"{self.place}: {reason_of(error)}")


LinePlace = Path | ObjectLines
"""A file of lines on a local disk, or lines in an object store."""


def lines_at(folder: str | Path, name: str) -> LinePlace:
    """Return the place of the lines `name` below a folder or a URI: a file, or a folder of objects."""
    if "://" in str(folder):
        return ObjectLines(f"{str(folder).rstrip('/')}/{name}")
    return Path(folder) / name
