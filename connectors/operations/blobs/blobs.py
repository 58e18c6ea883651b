"""Uploads and downloads of blobs, and references to them in messages, for HTTP routes and MCP tools (DL-25).

**Delivers** a blob as a whole: its digest is checked when it is stored, and again while it is sent.
**Acknowledges when** its bytes are on disk, or in the object store, and the record `blob.stored` is settled.
**Loses when** never silently: an upload that ended in an error can be repeated, and has its effect once.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from functools import partial
from typing import IO, Final

import structlog

from connectors.hub.blobs.blob_store import BlobMissing, Draft
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import (
    BLOB_GONE,
    UNREACHABLE,
    ApiError,
    crowded,
    existing,
    malformed,
    refuse_rejected,
    unavailable,
)
from connectors.hub.serving.identities import Origin
from connectors.hub.serving.shares import Places
from connectors.hub.serving.streaming_answer import ByteRange
from connectors.hub.serving.strict_request import NotRead
from connectors.operations.rules.hub_policy import check_rate
from schemas.streams.blob.blobs import STORED, BlobReference, BlobRow, BlobStored
from schemas.streams.control.organism import ListenerRow
from schemas.streams.mailboxes.message import MessageBodyRow, MessageRow
from trunkline_agent.wire.verdicts import REJECTED, TOO_LARGE

log = structlog.stdlib.get_logger(__name__)

_CHUNK_BYTES: Final = 1024 * 1024
_UNKNOWN: Final = "no blob with this digest is stored; upload it first"
_GONE: Final = "the blob was removed, or will be soon; upload it again"


def _nothing() -> None:
    return None


class Uploads:
    """The uploads of one gateway: at most 16 at once, and 4 of one principal. For the event loop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._places = Places(16, 4)

    async def upload(
        self,
        parts: AsyncIterable[bytes],
        content_type: str | None,
        origin: Origin,
        route: str,
        *,
        digest: str | None = None,
        announced: int | None = None,
        on_part: Callable[[], None] = _nothing,
    ) -> SettledRecord:
        """Store a content, and return the settled record `blob.stored`, which the live view has.

        Memory is bounded: about a MiB for each upload.

        Args:
            parts: The content.
            content_type: Its media type. None means `application/octet-stream`.
            origin: The door and the principal.
            route: The name of the route or tool, for the record of a refusal.
            digest: The SHA-256 that the content must have, in hex. None: any.
            announced: The length of the content, if it is known before.
            on_part: Called when a part of the content is in the file.

        Raises:
            ApiError: 400 for another digest, 413 for too large a content, 429 if the principal has sent too
                many bytes, 503 if too many uploads run or the bytes cannot be stored.
            BackboneUnreachable: Kafka is unreachable, or the record was not settled in time.
        """
        most = self._hub.settings.limits.blob_bytes
        if announced is not None and announced > most:
            raise too_large(most)
        if announced is not None:
            check_rate(self._hub, origin["principal"], announced, 0, route)
        draft = await self.begin(origin["principal"])
        try:
            await _write(draft, parts, most, on_part)
            if announced is None:
                check_rate(self._hub, origin["principal"], draft.size, 0, route)
            return await self.finish(draft, content_type, origin, digest)
        except OSError as error:
            raise not_stored(error) from error
        finally:
            self.drop(draft, origin["principal"])

    async def begin(self, principal: str) -> Draft:
        """Return an empty draft. The caller must end it by `drop`.

        Raises ApiError (503) if too many uploads run, or the disk fails, and BackboneUnreachable while Kafka is
        unreachable.
        """
        self._hub.appender.check()
        if not self._places.take(principal):
            raise crowded("too many uploads at once; try again later")
        try:
            return await asyncio.to_thread(self._hub.blob_store.new_draft)
        except BaseException as error:
            self._places.give_back(principal)
            if isinstance(error, OSError):
                raise not_stored(error) from error
            raise

    def drop(self, draft: Draft, principal: str) -> None:
        """End an upload. Its bytes are deleted unless `finish` has stored them. Call it once for each draft."""
        self._places.give_back(principal)
        draft.close()

    async def finish(
        self, draft: Draft, content_type: str | None, origin: Origin, digest: str | None = None
    ) -> SettledRecord:
        """Store the content of a whole draft, and return the settled record `blob.stored`.

        For the arguments and the errors see `upload`. Raises OSError, too.
        """
        if digest is not None and draft.digest != digest:
            raise malformed(f"the content has another SHA-256 than `digest`: {draft.digest}")
        return await self._store(draft, content_type, origin)

    async def _store(self, draft: Draft, content_type: str | None, origin: Origin) -> SettledRecord:
        """Make an object of the draft, unless there is one, and append the record."""
        store, digest = self._hub.blob_store, draft.digest
        known = self._hub.live_view.get(BlobRow, digest)
        there = None if known is None or known.status != STORED else known.object
        if there is not None and await asyncio.to_thread(store.is_whole, there, draft.size):
            settled = await self._settle(draft, there, content_type, origin)
            # It is rejected if the blob was removed at the same moment.
            if settled.verdict != REJECTED:
                return settled
        name = await asyncio.to_thread(store.keep, draft)
        settled = await self._settle(draft, name, content_type, origin)
        if settled.verdict == REJECTED:
            await asyncio.to_thread(store.delete, name)
        return refuse_rejected(settled)

    async def _settle(self, draft: Draft, name: str, content_type: str | None, origin: Origin) -> SettledRecord:
        body = BlobStored(
            digest=draft.digest,
            object=name,
            request_id=str(uuid.uuid4()),
            bytes=draft.size,
            content_type=content_type,
            keep_s=self._hub.settings.limits.blob_keep_s,
        )
        return await self._hub.appender.settle(body.record(**origin))


def not_stored(error: OSError) -> ApiError:
    """Log that the store has failed, and return the error (503) to raise."""
    log.warning("blob_not_stored", why=str(error))
    return unavailable(f"the blob cannot be stored: {error.strerror or 'the store fails'}", UNREACHABLE)


async def _write(draft: Draft, parts: AsyncIterable[bytes], most: int, on_part: Callable[[], None]) -> None:
    """Write a content to a draft, a MiB at a time. Raises ApiError (413) beyond `most` bytes."""
    waiting = bytearray()
    async for part in parts:
        waiting += part
        if draft.size + len(waiting) > most:
            raise too_large(most)
        if len(waiting) >= _CHUNK_BYTES:
            await asyncio.to_thread(draft.write, bytes(waiting))
            waiting.clear()
            on_part()
    await asyncio.to_thread(draft.write, bytes(waiting))


def too_large(most: int) -> ApiError:
    """Return the error (413) for a content of more than `most` bytes. The caller raises it."""
    return NotRead(
        413, TOO_LARGE, f"limits.blob_bytes allows a blob of {most} bytes at most", {"Connection": "close"}
    )


def stored_blob(hub: Hub, settled: SettledRecord) -> BlobRow:
    """Return the row of a blob after its upload. `settled` is the record `blob.stored`."""
    return existing(hub.live_view.get(BlobRow, settled.stream.partition("/")[2]), _UNKNOWN)


async def reference_to(
    hub: Hub, digest: str, recipient: str | None = None, *, is_new: bool = True
) -> BlobReference:
    """Return the reference to a blob, for a message that is to be posted.

    Args:
        hub: The hub.
        digest: The SHA-256 of the content.
        recipient: The recipient of the message. None: several.
        is_new: Whether the message is new. Another one was posted when the blob was stored, so the blob may be
            removed by now.

    Raises:
        ApiError: 400 for a listener of the XML pump, which gets no blobs, 404 for an unknown blob, 409 with the
        reason `blob_gone` for one that was removed or soon will be.
        BackboneUnreachable: The live view does not catch up with the log in time.
    """
    listener = None if recipient is None else hub.live_view.get(ListenerRow, recipient)
    if listener is not None and listener.is_live:
        raise malformed("blob: a listener of the XML pump gets no blobs")
    row = hub.live_view.get(BlobRow, digest)
    if row is None or (is_new and not hub.blobs.is_usable(row)):
        # Another gateway may have stored it a moment ago.
        await hub.fresh.catch_up()
        row = existing(hub.live_view.get(BlobRow, digest), _UNKNOWN)
        if is_new and not hub.blobs.is_usable(row):
            raise ApiError(409, BLOB_GONE, _GONE)
    return BlobReference(digest=digest, bytes=row.bytes, content_type=row.content_type)


class OpenBlob:
    """A blob that is being read. The owner calls `close`.

    Attributes:
        reference: The reference in the message.
    """

    def __init__(self, reference: BlobReference, file: IO[bytes], on_damage: Callable[[], None]) -> None:
        self.reference = reference
        self._file = file
        self._on_damage = on_damage

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the content, a MiB at a time.

        The last part comes when the digest of all is right. Otherwise OSError is raised, and the receiver lacks
        the end.
        """
        found, last = hashlib.sha256(), b""
        while part := await asyncio.to_thread(self._file.read, _CHUNK_BYTES):
            found.update(part)
            if last:
                yield last
            last = bytes(part)
        if found.hexdigest() != self.reference.digest:
            log.error("blob_damaged", digest=self.reference.digest)
            self._on_damage()
            raise OSError("the content of the blob does not have its digest")
        if last:
            yield last

    async def parts_of(self, wanted: ByteRange) -> AsyncIterator[bytes]:
        """Yield a part of the content, a MiB at a time. Raises OSError. The digest is not checked."""
        for offset in range(wanted.start, wanted.end, _CHUNK_BYTES):
            yield await asyncio.to_thread(self.part, offset, min(_CHUNK_BYTES, wanted.end - offset))

    def part(self, offset: int, limit: int) -> bytes:
        """Return at most `limit` bytes from `offset` on. Blocks. Raises OSError. The digest is not checked."""
        self._file.seek(min(offset, self.reference.bytes))
        return bytes(self._file.read(limit))

    def close(self) -> None:
        """Close the object. Further calls do nothing."""
        self._file.close()


async def blob_of_message(hub: Hub, key: str) -> tuple[BlobRow, BlobReference]:
    """Return the row of a message's blob, and its reference. The caller has checked the right to read it.

    Args:
        hub: The hub.
        key: The key of the message, `<realm>/<recipient>/<message id>`.

    Raises:
        ApiError: 404 for an unknown message or one without a blob, 410 with the reason `blob_gone` for a blob
            that was removed.
        BackboneUnreachable: The live view does not catch up with the log in time.
    """
    row = hub.live_view.get(MessageRow, key)
    blob = None if row is None or row.blob is None else hub.live_view.get(BlobRow, row.blob)
    if blob is None or blob.status != STORED:
        await hub.fresh.catch_up()
        row = hub.live_view.get(MessageRow, key)
        blob = None if row is None or row.blob is None else hub.live_view.get(BlobRow, row.blob)
    row = existing(row, "no such message in this mailbox, or it is not among those that the gateway keeps")
    if row.blob is None:
        raise ApiError(404, "not_found", "the message has no blob")
    if blob is None or blob.status != STORED:
        raise ApiError(410, BLOB_GONE, "the blob was removed after its last message had ended")
    body = hub.live_view.get(MessageBodyRow, key)
    named = blob.content_type if body is None or body.blob_type is None else body.blob_type
    return blob, BlobReference(digest=blob.digest, bytes=blob.bytes, content_type=named)


async def opened_blob(hub: Hub, key: str) -> OpenBlob:
    """Open the blob of a message for reading. For `key` and further errors see `blob_of_message`.

    Raises ApiError: 410 with the reason `blob_gone` if its bytes are lost, 503 if the store does not answer.
    """
    for attempt in range(2):
        blob, reference = await blob_of_message(hub, key)
        try:
            file: IO[bytes] = await asyncio.to_thread(hub.blob_store.open, blob.object, blob.bytes)
            return OpenBlob(reference, file, partial(hub.blob_store.note_damaged, blob.object))
        except BlobMissing:
            # It was removed or replaced since its row was read; or it is lost.
            if attempt:
                log.error("blob_lost", digest=blob.digest, object=blob.object)
            await hub.fresh.catch_up()
        except OSError as error:
            log.warning("blob_not_read", object=blob.object, why=str(error))
            raise unavailable("the store of the blobs does not answer", UNREACHABLE) from error
    raise ApiError(410, BLOB_GONE, "the store of the blobs has lost this one; the sender must upload it again")
