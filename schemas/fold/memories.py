"""Memories of the newest requests and seqs that a stream has accepted, by which the fold detects repeats."""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

from schemas.fold.settled import Outcome, duplicate, rejected
from schemas.wire.strict_json import canonical
from schemas.wire.verdicts import SEQ_CONFLICT, TOO_LATE

REQUESTS_KEPT: Final = 256
DIGESTS_KEPT: Final = 256
_DIGEST_BYTES: Final = 16


class RequestMemory(msgspec.Struct, array_like=True, gc=False):
    """A memory of the newest 256 requests of a stream.

    `digests` maps a hash of each request's CloudEvents id to a digest of its body, oldest first. After 256
    later requests a request is forgotten, and counts as new if it is sent again.
    """

    digests: dict[bytes, bytes] = {}

    def seen(self, ce_id: str, body: dict[str, Any]) -> Literal["new", "same", "other"]:
        """Return whether a request is new, was remembered before, or conflicts with one that was remembered.

        Args:
            ce_id: the CloudEvents id of the request's record.
            body: the decoded body of the record.

        Returns:
            `new` for an unknown or forgotten id, `same` if the id was remembered with an equal body, and
            `other` if it was remembered with another body.
        """
        known = self.digests.get(_digest(ce_id.encode("utf-8")))
        if known is None:
            return "new"
        return "same" if known == content_digest(body) else "other"

    def repeated(
        self,
        ce_id: str,
        body: dict[str, Any],
        status: str | None,
        why: str = "this request id was used with other content",
    ) -> Outcome | None:
        """Return the outcome of a repeated request, or `None` if the request is new and must be settled.

        Args:
            ce_id: the CloudEvents id of the request's record.
            body: the decoded body of the record.
            status: the status of the stream, which the outcome reports. `None` if the stream has none.
            why: the explanation of the rejection if the body differs.

        Returns:
            A duplicate if the id is known with an equal body. A rejection as `seq_conflict` if it is known with
            another body. `None` if the id is unknown.
        """
        seen = self.seen(ce_id, body)
        if seen == "new":
            return None
        return duplicate(status) if seen == "same" else rejected(SEQ_CONFLICT, why, status)

    def add(self, ce_id: str, body: dict[str, Any]) -> None:
        """Remember a request for which `seen` returned `new`. Forgets the oldest if there are more than 256.

        `ce_id` and `body` are the CloudEvents id and the decoded body of the request's record, as for `seen`.
        """
        self.digests[_digest(ce_id.encode("utf-8"))] = content_digest(body)
        if len(self.digests) > REQUESTS_KEPT:
            del self.digests[next(iter(self.digests))]


class SeqMemory(msgspec.Struct, array_like=True, gc=False):
    """A memory of the seqs that were accepted from one sender, to recognise repeated events (rule JE-07).

    A seq is the number that a sender gives an event.

    Attributes:
        floor: all seqs up to and including this one were accepted.
        last: the highest accepted seq.
        digests: the 256 highest accepted seqs, each with a 16-byte digest of its content. Once there are 256, a
            seq below all of them and above `floor` is too old: the memory cannot tell whether it was accepted,
            and could not recognise a repeat if it were accepted now.
    """

    floor: int = 0
    last: int = 0
    digests: dict[int, bytes] = {}

    def seen(self, seq: int, digest: bytes) -> Literal["new", "same", "other", "too_old"]:
        """Return whether a seq is new, was accepted before, conflicts with an accepted one, or is too old.

        Args:
            seq: the number that the sender gave the event.
            digest: a 16-byte digest of the event's content.

        Returns:
            `new` for a seq to settle now. `same` if it was accepted with this content, or was accepted and its
            content is forgotten. `other` if it was accepted with other content. `too_old` if the memory can no
            longer tell whether it was accepted.
        """
        if seq > self.last:
            return "new"
        known = self.digests.get(seq)
        if known is not None:
            return "same" if known == digest else "other"
        if seq <= self.floor:
            return "same"  # settled; its content is forgotten, but a repeat has no effect anyway
        return "too_old" if len(self.digests) >= DIGESTS_KEPT and seq < min(self.digests) else "new"

    def repeated(self, seq: int, digest: bytes, status: str) -> Outcome | None:
        """Return the outcome of a repeated or too old seq, or `None` if the seq is new and must be settled.

        Args:
            seq: the number that the sender gave the event.
            digest: a 16-byte digest of the event's content.
            status: the status of the stream, which the outcome reports.

        Returns:
            A duplicate if the seq was accepted with the same content, or with content that is forgotten. A
            rejection as `seq_conflict` if the content differs, and as `too_late` if the memory can no longer
            tell. `None` if the seq is new.
        """
        seen = self.seen(seq, digest)
        if seen == "new":
            return None
        if seen == "same":
            return duplicate(status)
        if seen == "other":
            return rejected(SEQ_CONFLICT, "this seq was settled with other content", status)
        return rejected(TOO_LATE, "too far behind the newest seqs to tell whether it was settled", status)

    def add(self, seq: int, digest: bytes) -> None:
        """Remember a seq for which `seen` returned `new`. Forgets the lowest if there are more than 256.

        `digest` is the 16-byte digest of the event's content, as for `seen`.
        """
        self.digests[seq] = digest
        if len(self.digests) > DIGESTS_KEPT:
            del self.digests[min(self.digests)]
        while self.floor + 1 in self.digests:
            self.floor += 1
        self.last = max(self.last, seq)


def content_digest(body: dict[str, Any]) -> bytes:
    """Return a 16-byte digest of a decoded body's canonical JSON. Equal bodies have equal digests."""
    return _digest(canonical(body))


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()[:_DIGEST_BYTES]
