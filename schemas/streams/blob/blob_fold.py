"""The fold of the stream `blob/<digest>`: a content that is stored, kept and removed (DL-25, DL-26).

The state has these entries: `blob`, the row, and `requests`, a memory of the newest requests. `requests/...`
has older ones. They remain after the blob is removed, so that a repeated record of an earlier upload counts
once.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from schemas.fold.entries import StructEntries
from schemas.fold.life_cycles import wrong_state
from schemas.fold.memories import RequestChunk, RequestMemory
from schemas.fold.settled import Outcome, accepted, changed, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.streams.blob.blob_registry import (
    BLOB_MODELS,
    BLOB_STORED,
    BLOB_TRANSITIONS,
    DEFAULT_CONTENT_TYPE,
    REMOVED,
    STORED,
    BlobRow,
)
from trunkline_agent.wire.ids import BLOB
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

_BLOB: Final = StructEntries("blob", BlobRow)
_REQUESTS: Final = StructEntries("requests", RequestMemory)
_OLDER_REQUESTS: Final = StructEntries("requests/", RequestChunk)
_SECOND_US: Final = 1_000_000


def settle_blob(given: FoldInput) -> Outcome:
    """Settle a record of `blob/<digest>`: update the stream state, return verdict and changed rows.

    `schemas.streams.fold.settle` calls this function with a checked body. The changes of the stream state,
    `given.entries`, count only if the record is accepted.
    """
    known = _BLOB.read(given.entries)
    requests = _REQUESTS.read(given.entries) or RequestMemory()
    repeated = requests.repeated(given, _OLDER_REQUESTS, None if known is None else known.status)
    if repeated is not None:
        return repeated
    found = _stored(given, known) if given.type == BLOB_STORED else _removed(given, known)
    if isinstance(found, Outcome):
        return found
    requests.add(given, _OLDER_REQUESTS)
    _REQUESTS.write(given.entries, requests)
    _BLOB.write(given.entries, found)
    return accepted(found.status, (changed(found),))


def _stored(given: FoldInput, known: BlobRow | None) -> BlobRow | Outcome:
    body = given.body
    if known is not None and known.bytes != body["bytes"]:
        return rejected(SEQ_CONFLICT, "the content of this digest has another length", known.status)
    if known is not None and known.status == REMOVED and known.object == body["object"]:
        # The gateways delete the object of a removed blob.
        return rejected(ILLEGAL_TRANSITION, "the object was removed with the blob", known.status)
    keep_s: int = body["keep_s"]
    keep_until = given.now_us + keep_s * _SECOND_US
    content_type = body.get("content_type", DEFAULT_CONTENT_TYPE)
    if known is not None and known.status == STORED:
        # Messages carry the media type, so it stays the same while the blob is stored.
        content_type, keep_s = known.content_type, max(keep_s, known.keep_s)
        keep_until = max(keep_until, known.keep_until)
    return BlobRow(
        digest=given.name,
        status=STORED,
        bytes=body["bytes"],
        content_type=content_type,
        object=body["object"],
        stored_by=given.sender,
        stored_at=given.now_us,
        keep_s=keep_s,
        keep_until=keep_until,
    )


def _removed(given: FoldInput, known: BlobRow | None) -> BlobRow | Outcome:
    if known is None:
        return rejected(UNKNOWN_STREAM, "no blob with this digest")
    if REMOVED not in BLOB_TRANSITIONS[known.status]:
        return wrong_state(BLOB_TRANSITIONS, known.status, "blob")
    if given.body["object"] != known.object:
        return rejected(ILLEGAL_TRANSITION, "the blob has another object", known.status)
    if given.now_us < known.keep_until:
        return rejected(ILLEGAL_TRANSITION, "the blob is still kept", known.status)
    return replace(known, status=REMOVED, removed_at=given.now_us)


BLOB_KIND: Final = StreamKind(
    name=BLOB,
    models=BLOB_MODELS,
    settle=settle_blob,
    row_of_each_stream=(BlobRow,),
    rows=(BlobRow,),
    named_by="digest",
)
