"""The stream `blob/<digest>`: a content that is stored, kept and removed (DL-25, DL-26).

A blob is a content of up to some MiB, named by its SHA-256. Its bytes are in an *object*, a file outside the
log. Each upload that stores bytes makes an object with a name of its own.

This module has the bodies of its records, its row, the reference in a message, and its fold. The state has
these entries: `blob`, the row, and `requests`, a memory of the newest requests. `requests/...` has older ones.
They remain after the blob is removed, so that a repeated record of an earlier upload counts once.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from schemas.fold.entries import StructEntries
from schemas.fold.request_fold import RequestFold
from schemas.fold.settled import Outcome, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind, Transitions
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import Name, Printable, WireBody, models_of
from trunkline_agent.wire.ids import BLOB
from trunkline_agent.wire.strict_json import INT_MAX
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT

BLOB_STORED: Final = "blob.stored"
BLOB_REMOVED: Final = "blob.removed"
BLOBS: Final = "blobs"

STORED: Final = "stored"
REMOVED: Final = "removed"
BLOB_TRANSITIONS: Final[Transitions] = {
    STORED: frozenset({STORED, REMOVED}),
    REMOVED: frozenset({STORED}),
}
KEEP_S_MOST: Final = 366 * 24 * 3600
CONTENT_TYPE_CHARACTERS_MOST: Final = 128
DEFAULT_CONTENT_TYPE: Final = "application/octet-stream"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
"""The SHA-256 of a content, 64 lower-case hex digits."""
BlobBytes = Annotated[int, Field(ge=0, le=INT_MAX)]
"""The length of a content in bytes."""
BlobContentType = Annotated[Printable, Field(min_length=1, max_length=CONTENT_TYPE_CHARACTERS_MOST)]
"""The media type of a content."""


class BlobReference(BaseModel):
    """The reference to a blob in a message: its digest, its length in bytes and its media type.

    The door fills in length and media type from the blob's row.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    digest: Digest
    bytes: BlobBytes
    content_type: BlobContentType


class BlobRow(Row, frozen=True, gc=False):
    """A row of `blobs`: a content that messages refer to, and the object that has its bytes."""

    VIEW: ClassVar = BLOBS
    KEY: ClassVar = ("digest",)

    digest: str
    """SHA-256 of the content, 64 hex digits."""
    status: str
    """`stored` or `removed`."""
    bytes: int
    """Length of the content in bytes."""
    content_type: str
    """Media type of the content, as its first sender named it."""
    object: str
    """Name of the object with the bytes, below the setting `storage.blobs`."""
    stored_by: str
    """Principal that uploaded the content last, as `<door>/<principal>`."""
    stored_at: Moment
    """Time at which the content was uploaded last."""
    keep_s: int
    """How many seconds the blob is kept after an upload, and after the end of its last message."""
    keep_until: Moment
    """Time before which the blob is not removed."""
    removed_at: Moment | None = None
    """Time at which the blob was removed. Null: it is stored."""

    @property
    def is_live(self) -> bool:
        """True if the blob is stored."""
        return self.status == STORED


class _BlobBody(WireBody):
    STREAM: ClassVar = "blob/{digest}"
    OMITS_NULLS: ClassVar = True

    digest: Digest
    object: Name


class BlobStored(_BlobBody):
    """Body of `blob.stored`: the bytes of a content are in the object `object`.

    For a blob that is stored, it renews the time until which the blob is kept. A new object replaces the old
    one, and the object of the row renews the time alone.

    Attributes:
        request_id: the id of the upload.
        bytes: the length of the content in bytes.
        content_type: the media type of the content. `None` means `application/octet-stream`.
        keep_s: how many seconds the blob is kept from now on, and after the end of its last message.
    """

    TYPE: ClassVar = BLOB_STORED
    IDENTITY: ClassVar = ("{origin}", "{digest}", "{request_id}")

    request_id: Name
    bytes: BlobBytes
    content_type: BlobContentType | None = None
    keep_s: Annotated[int, Field(ge=1, le=KEEP_S_MOST)]


class BlobRemoved(_BlobBody):
    """Body of `blob.removed`: the blob ends, and its object is deleted after this record.

    The door that appends it knows no message without a final status that refers to the blob. The fold rejects
    the record before `keep_until`, and for another object than that of the row.
    """

    TYPE: ClassVar = BLOB_REMOVED


BLOB_MODELS: Final = models_of(BlobStored, BlobRemoved)


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
