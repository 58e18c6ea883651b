"""Which seqs of a job are settled (JE-07), in bounded memory: a floor and the digests of the newest 256."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

DIGESTS_KEPT: Final = 256
Seen = Literal["new", "same", "other", "too_old"]


class SeqMemory(msgspec.Struct, array_like=True, gc=False):
    """All seqs up to `floor` are settled; `digests` (16 bytes each) tell the content of the newest 256.

    Once there are 256, a seq below all of them and above the floor is too old: whether it was settled is
    not known any more, and if it were accepted now, the same event sent again could not be told from it.
    """

    floor: int = 0
    last: int = 0
    digests: dict[int, bytes] = {}

    def seen(self, seq: int, digest: bytes) -> Seen:
        """What is known of `seq`: never settled, settled with this content, with another, or too old."""
        if seq > self.last:
            return "new"
        known = self.digests.get(seq)
        if known is not None:
            return "same" if known == digest else "other"
        if seq <= self.floor:
            return "same"  # settled, its content forgotten: it changes nothing either way
        return "too_old" if len(self.digests) >= DIGESTS_KEPT and seq < min(self.digests) else "new"

    def add(self, seq: int, digest: bytes) -> None:
        """Note a seq that `seen` called new as settled."""
        self.digests[seq] = digest
        if len(self.digests) > DIGESTS_KEPT:
            del self.digests[min(self.digests)]
        while self.floor + 1 in self.digests:
            self.floor += 1
        self.last = max(self.last, seq)
