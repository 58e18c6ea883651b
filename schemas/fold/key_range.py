"""The keys of a stream's entries with one prefix, in order, while changes of the entries are not stored yet."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from typing import Final

_FIRST_READ: Final = 32
_MOST_READ: Final = 8192


class KeyRange:
    """The keys that begin with `prefix`, as stored and with the changes that are kept.

    A store is read in parts, as far as an iteration gets, and each part once.

    Args:
        read: returns the first stored keys with a prefix and after a key, at most so many, in order.
        prefix: the prefix.
        kept: the kept changes by key; `None` for a deleted entry. The caller adds to it, and calls `note`.
    """

    __slots__ = ("_end", "_is_whole", "_kept", "_keys", "_most", "_prefix", "_read")

    def __init__(
        self, read: Callable[[str, str, int], list[str]], prefix: str, kept: Mapping[str, object]
    ) -> None:
        self._read, self._prefix, self._kept = read, prefix, kept
        # The keys up to and including `_end`, the last stored one that was read.
        self._keys: list[str] = []
        self._end = ""
        self._is_whole = False
        self._most = _FIRST_READ

    def note(self, key: str, *, is_there: bool) -> None:
        """Note that an entry with the prefix was changed or deleted. Not during an iteration."""
        if key > self._end and not self._is_whole:
            return
        at = bisect_left(self._keys, key)
        was_there = at < len(self._keys) and self._keys[at] == key
        if is_there and not was_there:
            insort(self._keys, key)
        elif was_there and not is_there:
            del self._keys[at]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys in order. They are read as far as the iteration gets."""
        at, keys = 0, self._keys
        while True:
            while at < len(keys):
                yield keys[at]
                at += 1
            if self._is_whole:
                return
            self._read_on()

    def _read_on(self) -> None:
        stored = self._read(self._prefix, self._end, self._most)
        self._is_whole = len(stored) < self._most
        begin, self._end = self._end, stored[-1] if stored else self._end
        self._most = min(self._most * 2, _MOST_READ)
        part = {key for key in stored if key not in self._kept}
        for key, value in self._kept.items():
            is_read = begin < key and (self._is_whole or key <= self._end)
            if is_read and value is not None and key.startswith(self._prefix):
                part.add(key)
        self._keys.extend(sorted(part))
