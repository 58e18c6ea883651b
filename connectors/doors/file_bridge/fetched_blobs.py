"""Blobs of messages from other doors: they become files of the queue (DL-27).

**Delivers** a content whole, with the right digest, or not at all. **Loses** nothing: a message whose blob
cannot be fetched stays in its mailbox, and a blob that was removed is named in the line.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, Final

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.streams.blob.blob_registry import BlobReference
from schemas.streams.mailboxes.message_text import note_of_blob
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.plans import Request
from trunkline_agent.queue import Queue, QueueError
from trunkline_agent.queue.message_record import BODY_LIMIT, blob_in_line, reference

_SILENCE_S: Final = 30.0
_GONE: Final = 410
# Bodies that say nothing beside a blob.
_EMPTY: Final = ("", "{}", "null", '""')
_TEXTS: Final = ("application/json", "application/x-ndjson", "application/xml")


class BlobGone(Exception):
    """The gateway does not have the blob any more."""


class BlobNotFetched(QueueError):
    """The blob does not come as a whole at present. A later attempt may succeed."""


class _NotText(Exception):
    """The content is not UTF-8, although its media type is that of a text."""


def blob_of_message(message: Mapping[str, Any]) -> BlobReference | None:
    """Return the reference to a message's blob, or None.

    `message` has the field names of the class `Message`. In an answer of the gateway, `blob` is the digest
    alone, and length and media type are in `blob_bytes` and `blob_type`.
    """
    blob = message.get("blob")
    if blob is None:
        return None
    if not isinstance(blob, Mapping):
        blob = {"digest": blob, "bytes": message["blob_bytes"], "content_type": message["blob_type"]}
    return BlobReference.model_validate(blob)


def is_body(message: Mapping[str, Any], blob: BlobReference) -> bool:
    """Return whether a blob becomes the body of the line: it is a text, and the message has no other body."""
    kind = blob.content_type.partition(";")[0].strip().lower()
    is_text = kind in _TEXTS or kind.startswith("text/")
    body = message["body"]
    return is_text and 0 < blob.bytes <= BODY_LIMIT and (body in _EMPTY or body == note_of_blob(blob.bytes))


def line_with_blob(
    record: Mapping[str, Any], message: Mapping[str, Any], blob: BlobReference, *, is_gone: bool = False
) -> dict[str, Any]:
    """Return the fields of a line whose blob is a file beside it; with `is_gone`, there is no such file.

    `record` are the fields of the line without the blob. If the message has no body of its own, and the blob
    is gone, the body says so: a program that does not know blobs must see it, too.
    """
    named = blob_in_line(record["msg_id"], blob.digest, blob.bytes, blob.content_type, is_gone=is_gone)
    line = {**record, "blob": named}
    if is_gone and (message["body"] in _EMPTY or message["body"] == note_of_blob(blob.bytes)):
        line["body"] = (
            f"[Trunkline: the content of this message, {blob.bytes} bytes of {blob.content_type}, "
            "was removed before it came to this queue. Ask the sender to send it again.]"
        )
    return line


def deliver(
    queue: Queue,
    gateway: GatewayClient,
    record: dict[str, Any],
    message: Mapping[str, Any],
) -> None:
    """Append a message of another door to the queue, with its blob if it has one.

    Args:
        queue: The queue.
        gateway: A client of the gateway.
        record: The fields of the line, without the blob.
        message: The message, with the field names of the class `Message`.

    Raises:
        BlobNotFetched: The blob cannot be fetched at present; nothing was appended.
        ValueError: No line can represent the message.
        QueueError: The files cannot be used.
    """
    session, blob = str(message["realm"]), blob_of_message(message)
    if blob is None:
        queue.deliver(record, session)
        return
    path = path_of("mailboxes", session, str(message["to"]), "messages", str(message["message_id"]), "blob")
    try:
        if is_body(message, blob):
            try:
                text = _text(_parts(gateway, path, blob))
                queue.deliver({**record, "body": reference(record["msg_id"])}, session, text)
                return
            except _NotText:
                pass
        queue.deliver(line_with_blob(record, message, blob), session, _parts(gateway, path, blob))
    except BlobGone:
        queue.deliver(line_with_blob(record, message, blob, is_gone=True), session)


def _parts(gateway: GatewayClient, path: str, blob: BlobReference) -> Iterator[bytes]:
    """Yield the content, a part at a time. After the last part its digest is checked.

    Raises BlobGone, and BlobNotFetched if it does not come, or not as a whole.
    """
    found, size = hashlib.sha256(), 0

    def refusal_of(status: int, headers: Mapping[str, str], body: bytes) -> Exception:
        if status == _GONE:
            return BlobGone(path)
        return BlobNotFetched(f"a blob cannot be fetched: {gateway.error_of(status, headers, body)}")

    try:
        with closing(gateway.parts(Request("GET", path), _SILENCE_S, refusal_of)) as parts:
            for part in filter(None, parts):
                found.update(part)
                size += len(part)
                if size > blob.bytes:
                    break
                yield part
    except TrunklineError as error:
        raise BlobNotFetched(f"a blob did not come as a whole: {error}") from error
    if size != blob.bytes or found.hexdigest() != blob.digest:
        raise BlobNotFetched("a blob came with another content than that of its digest")


def _text(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts. Raises _NotText, at the end at the latest, if they are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for part in parts:
            decoder.decode(part)
            yield part
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _NotText from None
