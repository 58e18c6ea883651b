"""Memories of the newest requests and seqs that a stream has accepted, by which the fold detects repeats.

A memory is part of another entry of the stream, which each record of the stream writes. So only the newest
digests are in the memory itself. Older ones are in entries of their own, the *chunks*: of requests by a hash of
the id, of seqs by their number. A record changes the memory and few chunks, however long the stream lives.

A memory of fold version 9 or earlier has all its digests in itself. The next change moves them into chunks.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.settled import Outcome, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import SEQ_CONFLICT, TOO_LATE

REQUESTS_KEPT: Final = 256
DIGESTS_KEPT: Final = 256
# So many digests are in the memory itself. A job of usual length has no chunks.
REQUESTS_INSIDE: Final = 16
DIGESTS_INSIDE: Final = 16
# Half of the requests inside are moved at once, each to one of these chunks.
REQUEST_CHUNKS: Final = 64
SEQS_IN_A_CHUNK: Final = 16
_DIGEST_BYTES: Final = 16


class RequestChunk(msgspec.Struct, array_like=True, gc=False):
    """Older requests: a hash of each CloudEvents id, with the request's number and the digest of its body."""

    known: dict[bytes, tuple[int, bytes]]


class SeqChunk(msgspec.Struct, array_like=True, gc=False):
    """Older seqs of one range, each with the digest of its content."""

    known: dict[int, bytes]


RequestChunks = StructEntries[RequestChunk]
"""The chunks of one memory of requests; each memory of a stream has a prefix of its own."""
SeqChunks = StructEntries[SeqChunk]
"""The chunks of one memory of seqs."""


class RequestMemory(msgspec.Struct, array_like=True, gc=False):
    """A memory of the newest 256 requests of a stream.

    After 256 later requests a request is forgotten, and counts as new if it is sent again.

    Attributes:
        digests: the newest requests: a hash of each CloudEvents id with a digest of the body, oldest first.
        moved: how many older requests there were. Chunks have the remembered ones among them.
    """

    digests: dict[bytes, bytes] = {}
    moved: int = 0

    def seen(self, given: FoldInput, chunks: RequestChunks) -> Literal["new", "same", "other"]:
        """Return whether a request is new, was remembered before, or conflicts with one that was remembered.

        Args:
            given: the record of the request, and the state of its stream.
            chunks: the chunks of this memory.

        Returns:
            `new` for an unknown or forgotten id, `same` if the id was remembered with an equal body, and
            `other` if it was remembered with another body.
        """
        identity = _identity(given)
        known = self.digests.get(identity)
        if known is None and self.moved:
            chunk = chunks.read(given.entries, _request_chunk(identity))
            number, digest = (-1, None) if chunk is None else chunk.known.get(identity, (-1, None))
            known = digest if number >= self._first else None
        if known is None:
            return "new"
        return "same" if known == content_digest(given.body) else "other"

    @property
    def _first(self) -> int:
        """The number of the oldest request that is remembered."""
        return max(0, self.moved + len(self.digests) - REQUESTS_KEPT)

    def repeated(
        self,
        given: FoldInput,
        chunks: RequestChunks,
        status: str | None,
        why: str = "this request id was used with other content",
    ) -> Outcome | None:
        """Return the outcome of a repeated request, or `None` if the request is new and must be settled.

        Args:
            given: the record of the request, and the state of its stream.
            chunks: the chunks of this memory.
            status: the status of the stream, which the outcome reports. `None` if the stream has none.
            why: the explanation of the rejection if the body differs.

        Returns:
            A duplicate if the id is known with an equal body. A rejection as `seq_conflict` if it is known with
            another body. `None` if the id is unknown.
        """
        seen = self.seen(given, chunks)
        if seen == "new":
            return None
        return duplicate(status) if seen == "same" else rejected(SEQ_CONFLICT, why, status)

    def add(self, given: FoldInput, chunks: RequestChunks) -> None:
        """Remember a request for which `seen` returned `new`. Forgets the oldest if there are more than 256.

        The arguments are those of `seen`. Chunks may change, too.
        """
        self.digests[_identity(given)] = content_digest(given.body)
        if len(self.digests) <= REQUESTS_INSIDE:
            return
        first = self._first
        for identity in list(self.digests)[: len(self.digests) - REQUESTS_INSIDE // 2]:
            at = _request_chunk(identity)
            chunk = chunks.read(given.entries, at) or RequestChunk({})
            chunk.known = {one: found for one, found in chunk.known.items() if found[0] >= first}
            chunk.known[identity] = (self.moved, self.digests.pop(identity))
            self.moved += 1
            chunks.write(given.entries, chunk, at)


class SeqMemory(msgspec.Struct, array_like=True, gc=False):
    """A memory of the seqs that were accepted from one sender, to recognise repeated events (rule JE-07).

    A seq is the number that a sender gives an event. The memory has the 256 highest accepted seqs, each with a
    16-byte digest of its content. Once there are 256, a seq below all of them and above `floor` is too old: the
    memory cannot tell whether it was accepted, and could not recognise a repeat if it were accepted now.

    Attributes:
        floor: all seqs up to and including this one were accepted.
        last: the highest accepted seq.
        digests: the newest of the remembered seqs with their digests.
        moved: how many of the remembered seqs are in chunks.
        lowest: the lowest of those. Lower ones in chunks are forgotten.
    """

    floor: int = 0
    last: int = 0
    digests: dict[int, bytes] = {}
    moved: int = 0
    lowest: int = 0

    def seen(
        self, seq: int, digest: bytes, entries: Entries, chunks: SeqChunks
    ) -> Literal["new", "same", "other", "too_old"]:
        """Return whether a seq is new, was accepted before, conflicts with an accepted one, or is too old.

        Args:
            seq: the number that the sender gave the event.
            digest: a 16-byte digest of the event's content.
            entries: the entries of the stream.
            chunks: the chunks of this memory.

        Returns:
            `new` for a seq to settle now. `same` if it was accepted with this content, or was accepted and its
            content is forgotten. `other` if it was accepted with other content. `too_old` if the memory can no
            longer tell whether it was accepted.
        """
        if seq > self.last:
            return "new"
        known = self._known(seq, entries, chunks)
        if known is not None:
            return "same" if known == digest else "other"
        if seq <= self.floor:
            return "same"  # settled; its content is forgotten, but a repeat has no effect anyway
        is_full = self.moved + len(self.digests) >= DIGESTS_KEPT
        return "too_old" if is_full and seq < min(self.digests) and self._is_below_moved(seq) else "new"

    def _is_below_moved(self, seq: int) -> bool:
        return not self.moved or seq < self.lowest

    def _known(self, seq: int, entries: Entries, chunks: SeqChunks) -> bytes | None:
        """Return the digest of a remembered seq, else `None`."""
        known = self.digests.get(seq)
        if known is None and not self._is_below_moved(seq):
            chunk = chunks.read(entries, _seq_chunk(seq))
            known = None if chunk is None else chunk.known.get(seq)
        return known

    def repeated(
        self, seq: int, digest: bytes, entries: Entries, chunks: SeqChunks, status: str
    ) -> Outcome | None:
        """Return the outcome of a repeated or too old seq, or `None` if the seq is new and must be settled.

        Args:
            seq: the number that the sender gave the event.
            digest: a 16-byte digest of the event's content.
            entries: the entries of the stream.
            chunks: the chunks of this memory.
            status: the status of the stream, which the outcome reports.

        Returns:
            A duplicate if the seq was accepted with the same content, or with content that is forgotten. A
            rejection as `seq_conflict` if the content differs, and as `too_late` if the memory can no longer
            tell. `None` if the seq is new.
        """
        seen = self.seen(seq, digest, entries, chunks)
        if seen == "new":
            return None
        if seen == "same":
            return duplicate(status)
        if seen == "other":
            return rejected(SEQ_CONFLICT, "this seq was settled with other content", status)
        return rejected(TOO_LATE, "too far behind the newest seqs to tell whether it was settled", status)

    def add(self, seq: int, digest: bytes, entries: Entries, chunks: SeqChunks) -> None:
        """Remember a seq for which `seen` returned `new`. Forgets the lowest if there are more than 256.

        The arguments are those of `seen`. Chunks may change, too.
        """
        digests, following = self.digests, self.floor + 1
        digests[seq] = digest
        if seq > self.last:
            self.last = seq
        if self.moved + len(digests) > DIGESTS_KEPT:
            self._forget_lowest(entries, chunks)
        while following <= self.last and (
            following in digests or self._known(following, entries, chunks) is not None
        ):
            following += 1
        self.floor = following - 1
        while len(digests) > DIGESTS_INSIDE:
            self._move(entries, chunks)

    def _forget_lowest(self, entries: Entries, chunks: SeqChunks) -> None:
        inside = min(self.digests)
        if self._is_below_moved(inside):
            del self.digests[inside]
            return
        before, self.moved = _seq_chunk(self.lowest), self.moved - 1
        self.lowest = self._next_moved(entries, chunks) if self.moved else 0
        after = _seq_chunk(self.lowest) if self.moved else ""
        if before != after:
            chunks.delete(entries, before)

    def _next_moved(self, entries: Entries, chunks: SeqChunks) -> int:
        """Return the lowest seq in chunks that is greater than `lowest`."""
        following = self.lowest + 1
        # All seqs up to the floor are remembered if a lower one is. So most chunks need not be read.
        if following <= self.floor and following not in self.digests:
            return following
        for key in entries.with_prefix(chunks.key):
            chunk = chunks.read(entries, key.removeprefix(chunks.key))
            later = [seq for seq in (chunk.known if chunk else ()) if seq > self.lowest]
            if later:
                return min(later)
        raise LookupError(f"{self.moved} digests are in no chunk")

    def _move(self, entries: Entries, chunks: SeqChunks) -> None:
        """Move the digests of the lowest range inside into their chunk."""
        lowest, digests = min(self.digests), self.digests
        at, end = _seq_chunk(lowest), (lowest // SEQS_IN_A_CHUNK + 1) * SEQS_IN_A_CHUNK
        moving = {seq: digests.pop(seq) for seq in range(lowest, end) if seq in digests}
        chunk = chunks.read(entries, at) or SeqChunk({})
        chunk.known.update(moving)
        chunks.write(entries, chunk, at)
        self.lowest = lowest if self._is_below_moved(lowest) else self.lowest
        self.moved += len(moving)


def _identity(given: FoldInput) -> bytes:
    return _digest(given.envelope.ce_id.encode("utf-8"))


def _request_chunk(identity: bytes) -> str:
    return f"{identity[0] % REQUEST_CHUNKS:02x}"


def _seq_chunk(seq: int) -> str:
    return f"{seq // SEQS_IN_A_CHUNK:016x}"


def forget_seqs(entries: Entries, chunks: SeqChunks) -> None:
    """Delete the chunks of a memory, before a new `SeqMemory` takes its place."""
    for key in entries.with_prefix(chunks.key):
        entries.delete(key)


def content_digest(body: dict[str, Any]) -> bytes:
    """Return a 16-byte digest of a decoded body's canonical JSON. Equal bodies have equal digests."""
    return _digest(canonical(body))


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()[:_DIGEST_BYTES]
