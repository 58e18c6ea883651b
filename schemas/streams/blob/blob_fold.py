"""The fold of the stream `blob/<digest>`: a content that is stored, kept and removed (DL-25, DL-26).

The state has these entries: `blob`, the row, and `requests`, a memory of the newest requests. `requests/...`
has older ones. They remain after the blob is removed, so that a repeated record of an earlier upload counts
once.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from schemas.fold.entries import StructEntries
from schemas.fold.request_fold import RequestFold
from schemas.fold.settled import Outcome, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.streams.blob.blob_registry import (
    BLOB_MODELS,
    BLOB_REMOVED,
    BLOB_STORED,
    BLOB_TRANSITIONS,
    DEFAULT_CONTENT_TYPE,
    REMOVED,
    STORED,
    BlobRow,
)
from trunkline_agent.wire.ids import BLOB
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT

_SECOND_US: Final = 1_000_000


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


def _removed(given: FoldInput, known: BlobRow) -> BlobRow | Outcome:
    if given.body["object"] != known.object:
        return rejected(ILLEGAL_TRANSITION, "the blob has another object", known.status)
    if given.now_us < known.keep_until:
        return rejected(ILLEGAL_TRANSITION, "the blob is still kept", known.status)
    return replace(known, status=REMOVED, removed_at=given.now_us)


_FOLD: Final = RequestFold(
    StructEntries("blob", BlobRow),
    {BLOB_STORED: _stored, BLOB_REMOVED: _removed},
    begins=(BLOB_STORED,),
    unknown="no blob with this digest",
    noun="blob",
    transitions=BLOB_TRANSITIONS,
    leads_to={BLOB_REMOVED: REMOVED},
)
BLOB_KIND: Final = StreamKind(
    name=BLOB,
    models=BLOB_MODELS,
    settle=_FOLD.settle,
    row_of_each_stream=(BlobRow,),
    rows=(BlobRow,),
    named_by="digest",
)
