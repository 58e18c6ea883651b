"""Lines that only grow, in an object store: those of the audit chain, and those of its anchors.

An object store cannot append to an object. So each append is an object of its own, and none is written over: a
bucket whose objects nobody can change (object lock) serves for anchors. An object's name has the places of its
first and its last line. A crash may leave a line in two objects.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from schemas.tables.delta_files import reason_of
from trunkline_agent.errors import TrunklineError

_READ_AT_ONCE: Final = 16
_MERGED_FROM: Final = 100
# All lines of a merge are in memory at once; an object has the entries of some seconds.
_MERGED_MOST: Final = 2000
_TRIES: Final = 5


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
        try:
            return any(page for page in self._store.list(chunk_size=1))
        except BaseError as error:
            raise self._trouble(error) from error

    def lines(self) -> Iterator[bytes]:
        """Yield all lines with their line ends, in order. A line that several objects have comes once."""
        given = 0
        for attempt in itertools.count(1):
            try:
                for line in itertools.islice(self._in_order(), given, None):
                    given += 1
                    yield line
            except (BaseError, OSError) as error:
                self._try_again(error, attempt)
            else:
                return

    def _in_order(self) -> Iterator[bytes]:
        until, seen = -1, set[bytes]()
        for name, lines in self._objects(sorted(self._names())):
            first, last = map(int, name.split("-")[:2])
            # Only objects whose places overlap can have the same lines.
            if first > until:
                seen.clear()
            until = max(until, last)
            for line in lines:
                if line not in seen:
                    seen.add(line)
                    yield line

    def from_end(self) -> Iterator[bytes]:
        """Yield all lines with their line ends, the last one first. Some may come again."""
        for attempt in itertools.count(1):
            try:
                names = sorted(self._names(), key=lambda name: name.split("-")[1], reverse=True)
                for _, lines in self._objects(names):
                    yield from reversed(lines)
            except (BaseError, OSError) as error:
                self._try_again(error, attempt)
            else:
                return

    def _try_again(self, error: Exception, attempt: int) -> None:
        """Raise an error of a reader, unless a merge has deleted what was listed. Its lines are elsewhere."""
        if not isinstance(error, FileNotFoundError) or attempt == _TRIES:
            raise self._trouble(error) from error

    def append(self, first: int, last: int, lines: bytes) -> None:
        """Write whole lines as one object.

        Args:
            first: The place of the first line, such as a time or a version.
            last: The place of the last line.
            lines: The lines.
        """
        try:
            self._store.put(f"{first:020d}-{last:020d}-{uuid.uuid4().hex[:12]}.ndjson", lines, mode="create")
        except (BaseError, OSError) as error:
            raise self._trouble(error) from error

    def merge(self) -> None:
        """Join up to 2,000 small objects to one, the oldest first. A crash leaves lines in two, and loses none.

        Call it only if objects may be deleted, and while nobody else merges. Readers go on.
        """
        small = sorted(name for name in self._names() if "+" not in name)[:_MERGED_MOST]
        if len(small) < _MERGED_FROM:
            return
        first, last = small[0].split("-")[0], max(name.split("-")[1] for name in small)
        try:
            lines = list(dict.fromkeys(line for _, found in self._objects(small) for line in found))
            self._store.put(f"{first}-{last}-{uuid.uuid4().hex[:12]}+.ndjson", b"".join(lines), mode="create")
            self._store.delete(small)
        except (BaseError, OSError) as error:
            raise self._trouble(error) from error

    @cached_property
    def _store(self) -> ObjectStore:
        # A bucket with object lock refuses an object without a checksum.
        if self.place.startswith("s3"):
            return from_url(self.place, config={"checksum_algorithm": "SHA256"})
        return from_url(self.place)

    def _names(self) -> list[str]:
        try:
            return [file["path"] for page in self._store.list() for file in page]
        except BaseError as error:
            raise self._trouble(error) from error

    def _objects(self, names: Sequence[str]) -> Iterator[tuple[str, list[bytes]]]:
        """Yield the objects of these names, each with its lines. Raises the errors of obstore."""

        def read(name: str) -> tuple[str, list[bytes]]:
            return name, bytes(self._store.get(name).bytes()).splitlines(keepends=True)

        # The first one alone: a reader of the newest line needs no other.
        starts = [0, 1] if names else [0]
        starts += range(1 + _READ_AT_ONCE, len(names), _READ_AT_ONCE)
        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            for begin, end in itertools.pairwise([*starts, len(names)]):
                yield from list(threads.map(read, names[begin:end]))

    def _trouble(self, error: Exception) -> TrunklineError:
        return TrunklineError(f"{self.place}: {reason_of(error)}")


LinePlace = Path | ObjectLines
"""A file of lines on a local disk, or lines in an object store."""


def lines_at(folder: str | Path, name: str) -> LinePlace:
    """Return the place of the lines `name` below a folder or a URI: a file, or a folder of objects."""
    where = urlsplit(str(folder))
    if where.scheme == "file":
        return Path(unquote(where.path)) / name
    if "://" in str(folder):
        return ObjectLines(f"{str(folder).rstrip('/')}/{name}")
    return Path(folder) / name
