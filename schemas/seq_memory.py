"""Which seqs of a job are settled (JE-07), in bounded memory: a floor and the digests of the newest 256."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

DIGESTS_KEPT: Final = 256
Seen = Literal["new", "same", "other", "too_old"]


class SeqMemory(msgspec.Struct, array_like=True, gc=False):
    """All seqs up to `floor` are settled; `digests` (16 bytes each) tell the content of the newest 256.

    `forgotten` is the highest seq whose digest was dropped. A seq above the floor that is not above
    `forgotten` and has no digest may or may not have been settled: nobody can tell any more.
    """

    floor: int = 0
    forgotten: int = 0
    last: int = 0
    digests: dict[int, bytes] = {}

    def seen(self, seq: int, digest: bytes) -> Seen:
        """What is known of `seq`: never settled, settled with this content, with another, or too old."""
        known = self.digests.get(seq)
        if known is not None:
            return "same" if known == digest else "other"
        if seq <= self.floor:
            return "same"  # settled, its content forgotten: it changes nothing either way
        return "too_old" if seq <= self.forgotten else "new"

    def add(self, seq: int, digest: bytes) -> None:
        """Note a seq that `seen` called new as settled."""
        self.digests[seq] = digest
        if len(self.digests) > DIGESTS_KEPT:
            oldest = min(self.digests)
            del self.digests[oldest]
            self.forgotten = max(self.forgotten, oldest)
            if oldest == self.floor + 1:
                self.floor = oldest
        while self.floor + 1 in self.digests:
            self.floor += 1
        self.last = max(self.last, seq)
