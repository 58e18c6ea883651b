"""A sorted set of byte strings in memory: parts of it are counted and listed without looking at the rest."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

_BLOCK: Final = 1024


class SortedKeys:
    """A sorted set of byte strings. Not thread-safe.

    The keys are in blocks of up to 1,024, so that a change moves few of them. With a million keys, adding,
    removing and finding one takes some microseconds, and counting a range some tens.
    """

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]
        # The first key of each block. The first block counts as beginning before all keys.
        self._firsts: list[bytes] = [b""]

    def add(self, key: bytes) -> None:
        """Add a key. One that is in the set already is ignored."""
        number, place = self._place(key)
        block = self._blocks[number]
        if place < len(block) and block[place] == key:
            return
        block.insert(place, key)
        if len(block) > _BLOCK:
            tail = block[_BLOCK // 2 :]
            del block[_BLOCK // 2 :]
            self._blocks.insert(number + 1, tail)
            self._firsts.insert(number + 1, tail[0])

    def remove(self, key: bytes) -> None:
        """Remove a key. One that is not in the set is ignored."""
        number, place = self._place(key)
        block = self._blocks[number]
        if place == len(block) or block[place] != key:
            return
        del block[place]
        if not block and number:
            del self._blocks[number], self._firsts[number]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def count(self, low: bytes, high: bytes) -> int:
        """Return the number of keys from `low` up to but not including `high`, 0 if `high` is lower."""
        if high <= low:
            return 0
        (first, begin), (last, end) = self._place(low), self._place(high)
        return sum(map(len, self._blocks[first:last])) - begin + end

    def highest(self, low: bytes, high: bytes, most: int) -> list[bytes]:
        """Return up to `most` keys from `low` up to but not including `high`: the highest, highest first."""
        (first, begin), (last, end) = self._place(low), self._place(high)
        found: list[bytes] = []
        for number in range(last, first - 1, -1):
            block = self._blocks[number]
            part = block[begin if number == first else 0 : end if number == last else len(block)]
            found += part[::-1]
            if len(found) >= most:
                break
        return found[:most]

    def lowest(self, low: bytes, high: bytes, most: int) -> list[bytes]:
        """Return up to `most` keys from `low` up to but not including `high`: the lowest, lowest first."""
        (first, begin), (last, end) = self._place(low), self._place(high)
        found: list[bytes] = []
        for number in range(first, last + 1):
            block = self._blocks[number]
            found += block[begin if number == first else 0 : end if number == last else len(block)]
            if len(found) >= most:
                break
        return found[:most]

    def _place(self, key: bytes) -> tuple[int, int]:
        """Return the block and the place in it of the first key that is not lower than `key`."""
        number = bisect_right(self._firsts, key) - 1
        return number, bisect_left(self._blocks[number], key)
