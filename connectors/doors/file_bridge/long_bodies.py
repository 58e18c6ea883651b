"""Bodies of the file queue that are too long for a record: they become blobs at the gateway (DL-27).

**Reads** a side-file twice: for its digest a part at a time, and for the upload, 16 MiB at most. **Delivers** a
reference only after the gateway has stored the blob. **Loses** nothing: without a gateway the line waits, and a
bridge that is killed uploads the same blob again.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple

import structlog

from connectors.doors.file_bridge.posting_rules import NO_GATEWAY
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.network.rates import Backoff
from schemas.settings.settings import Settings
from schemas.streams.blob.blob_registry import BlobReference
from schemas.streams.mailboxes.message_text import FILE_BLOB_TYPE
from trunkline_agent.errors import RateLimited, TrunklineError
from trunkline_agent.hub.plans import Request, Retries, exchange
from trunkline_agent.queue.message_record import BODY_LIMIT, side_file_of
from trunkline_agent.queue.session_files import BODIES, CHUNK_BYTES, SessionFolder
from trunkline_agent.queue.side_files import with_body
from trunkline_agent.wire.verdicts import RATE_LIMITED

log = structlog.stdlib.get_logger(__name__)

Parts = Callable[[], Iterator[bytes]]
"""A function that yields a content from its beginning, a part at a time."""

# Room for the other fields of a record, whose names are limited.
_FIELDS_BYTES: Final = 4096
# JSON has at most six bytes for a byte of text.
_ESCAPED_MOST: Final = 6
_ANSWER_S: Final = 30.0
# The line is tried again later anyway.
_ONE_ATTEMPT: Final = Retries(patience_s=0)
# After a failure all uploads wait for so long, so that a gateway that hangs delays other lines little.
_PAUSE_S: Final = 5.0
_KNOWN_MOST: Final = 1000


class NotUploaded(Exception):
    """A body cannot become a blob at present. `reason` says why the line waits, such as `no_gateway`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Body(NamedTuple):
    """The body of a line: its text, or the blob that has it, and its length in UTF-8."""

    text: str
    size: int
    blob: BlobReference | None = None

    @property
    def blob_bytes(self) -> int:
        """The length of the blob in bytes; 0 without one."""
        return 0 if self.blob is None else self.blob.bytes


def body_in(folder: SessionFolder, message: dict[str, Any], blobs: GatewayBlobs) -> Body:
    """Return the body of a message of the queue; a body that is too long for a record becomes a blob.

    A body that is too long for a blob, too, is returned as text. The same line always gives the same result,
    whatever the limits of its mailbox are, because a line may be posted again.

    Raises:
        ValueError: The side-file is missing or broken.
        NotUploaded: The blob cannot be stored at present.
        OSError: The side-file cannot be read.
    """
    side_file = side_file_of(message)
    if side_file is not None:
        found = _blob_of_file(folder, side_file, blobs)
        if found is not None:
            return found
    whole = with_body(folder, message)
    if "_body_error" in whole:  # the reference is not the text that the sender wrote
        raise ValueError(whole["_body_error"])
    text = str(whole["body"])
    content = text.encode()
    if len(content) > blobs.blob_most or not _is_long(text, len(content), blobs.record_most):
        return Body(text, len(content))
    return Body("", len(content), blobs.upload(lambda: _pieces(content)))


def _blob_of_file(folder: SessionFolder, side_file: str, blobs: GatewayBlobs) -> Body | None:
    """Upload a long side-file without reading it as a whole; None if it is not long, or not to be read."""
    try:
        fd = folder.open_file(side_file, BODIES)
    except OSError:  # `with_body` says why
        return None
    if fd is None:
        return None
    with fd:
        size = os.fstat(fd).st_size
        if not blobs.record_most < size <= min(blobs.blob_most, BODY_LIMIT):
            return None
        reference = blobs.upload(lambda: _file_parts(fd, size))
        return Body("", reference.bytes, reference)


def _is_long(text: str, size: int, record_most: int) -> bool:
    if size * _ESCAPED_MOST + _FIELDS_BYTES <= record_most:
        return False
    return len(json.dumps(text, ensure_ascii=False).encode()) + _FIELDS_BYTES > record_most


def _file_parts(fd: int, size: int) -> Iterator[bytes]:
    offset = 0
    while offset < size and (part := os.pread(fd, min(CHUNK_BYTES, size - offset), offset)):
        yield part
        offset += len(part)


def _pieces(content: bytes) -> Iterator[bytes]:
    for first in range(0, len(content), CHUNK_BYTES):
        yield content[first : first + CHUNK_BYTES]


class GatewayBlobs:
    """The blobs of the gateway in the settings. For one thread.

    A stored blob is known for half of the time that the gateway keeps it. A line that is tried again within
    that time, such as for a full mailbox, does not need another upload.

    Args:
        settings: The settings of the gateway and the limits.
        is_up: Returns whether the gateway can be reached. While it cannot, nothing is tried.

    Attributes:
        record_most: The longest value of a record, in bytes. The longer bodies become blobs.
        blob_most: The longest blob, in bytes.
    """

    def __init__(self, settings: Settings, is_up: Callable[[], bool]) -> None:
        self._settings = settings
        self._is_up = is_up
        self.record_most = settings.limits.payload_bytes
        self.blob_most = settings.limits.blob_bytes
        self._known: OrderedDict[str, float] = OrderedDict()
        self._not_before = 0.0
        self._pauses = Backoff(_PAUSE_S, _PAUSE_S)

    def upload(self, parts: Parts) -> BlobReference:
        """Store a text as a blob, and return the reference to it.

        Raises NotUploaded, ValueError for a content that is not UTF-8, and OSError if it cannot be read.
        """
        reference = _reference_to(parts())
        if self._known.get(reference.digest, 0.0) > time.monotonic():
            return reference
        if not self._is_up() or time.monotonic() < self._not_before:
            raise NotUploaded(NO_GATEWAY)
        try:
            self._put(reference, parts())
        except TrunklineError as error:
            self._not_before = time.monotonic() + self._pauses.next_s()
            if self._pauses.is_to_log(str(error)):
                log.warning("blob_not_uploaded", why=str(error))
            raise NotUploaded(NO_GATEWAY) from error
        return reference

    def _put(self, reference: BlobReference, parts: Iterator[bytes]) -> None:
        request = Request(
            "PUT",
            path_of("blobs"),
            {"digest": reference.digest},
            {"Content-Type": reference.content_type},
            b"".join(parts),
        )
        with GatewayClient(self._settings, answer_timeout_s=_ANSWER_S) as hub:
            try:
                answer = hub.run(exchange(request, _ONE_ATTEMPT))
            except RateLimited as error:
                raise NotUploaded(RATE_LIMITED) from error
        keep_until = datetime.fromisoformat(answer.json()["keep_until"]).timestamp()
        self._known[reference.digest] = time.monotonic() + (keep_until - time.time()) / 2
        self._known.move_to_end(reference.digest)
        if len(self._known) > _KNOWN_MOST:
            self._known.popitem(last=False)


def _reference_to(parts: Iterator[bytes]) -> BlobReference:
    """Return the reference to a text. Raises ValueError if it is not UTF-8, or empty."""
    found, size = hashlib.sha256(), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    for part in parts:
        found.update(part)
        size += len(part)
        decoder.decode(part)
    decoder.decode(b"", final=True)
    if size == 0:
        raise ValueError("the side-file is empty")
    return BlobReference(digest=found.hexdigest(), bytes=size, content_type=FILE_BLOB_TYPE)
