"""The HTTP routes of blobs (DL-25): upload a large content, and fetch the one that a message refers to."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request, Response
from starlette.requests import ClientDisconnect

from connectors.hub.engine.operation import owner_by
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import Routes
from connectors.hub.serving.answers import DOOR, json_answer, malformed
from connectors.hub.serving.bounded_http import BODY_PROGRESS
from connectors.hub.serving.identities import Origin, caller_of
from connectors.hub.serving.models import ERRORS, NAMED
from connectors.hub.serving.policy import Action
from connectors.hub.serving.streaming_answer import StreamPlaces, is_unchanged, range_of
from connectors.hub.serving.strict_request import check_body_headers
from connectors.operations.blobs.blobs import Uploads, opened_blob, stored_blob
from connectors.operations.principals.principal_operations import MAILBOX, NamePath, RealmPath
from connectors.operations.rules.message_models import BlobFilter, StoredBlobAnswer
from connectors.operations.rules.owners import owner_of_mailbox
from schemas.streams.blob.blobs import (
    CONTENT_TYPE_CHARACTERS_MOST,
    DEFAULT_CONTENT_TYPE,
    BlobReference,
)
from trunkline_agent.wire.moments import iso_moment

BLOBS: Final = "/api/hub/blobs"
_ROUTE: Final = f"PUT {BLOBS}"
_BINARY: Final[dict[str, Any]] = {"type": "string", "format": "binary"}
_CONTENT: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {DEFAULT_CONTENT_TYPE: {"schema": _BINARY, "example": "the bytes of a picture"}},
    }
}
_FETCHED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {DEFAULT_CONTENT_TYPE: {"schema": _BINARY, "example": "the bytes of a picture"}}},
    **ERRORS,
}
MessagePath = Annotated[str, Path(**NAMED, description="Id of the message.")]


def add_blob_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that upload and fetch blobs. Called once, when the gateway starts."""
    _add_upload_route(routes, hub)
    _add_fetch_routes(routes, hub)


def _add_upload_route(routes: Routes, hub: Hub) -> None:
    uploads = Uploads(hub)

    @routes.put(BLOBS, Action.MESSAGE_SEND, StoredBlobAnswer, openapi_extra=_CONTENT)
    async def upload_blob(request: Request, wanted: Annotated[BlobFilter, Query()]) -> Response:
        """Store a large content, for messages to refer to by its SHA-256. The body is the content itself.

        The answer comes when all bytes are stored. A content that is stored already is kept for longer. A blob
        is removed when it was kept for `limits.blob_keep_s` and no message refers to it.

        The answer is 413 for a content over `limits.blob_bytes`, 400 when it does not have the SHA-256
        `digest`, 415 for a Content-Encoding (name the coding in Content-Type, such as `application/gzip`), and
        429 when the caller has sent too many bytes in a minute.
        """
        check_body_headers(request.scope, is_text=False)
        origin: Origin = {"door": DOOR, "principal": caller_of(request).principal}
        settled = await uploads.upload(
            _parts(request),
            _content_type(request),
            origin,
            _ROUTE,
            digest=wanted.digest,
            announced=_announced(request),
            on_part=request.scope.get(BODY_PROGRESS, _nothing),
        )
        row = stored_blob(hub, settled)
        answer = {"digest": row.digest, "bytes": row.bytes, "content_type": row.content_type}
        return json_answer({**answer, "keep_until": iso_moment(row.keep_until)}, verdict=settled.verdict)


def _add_fetch_routes(routes: Routes, hub: Hub) -> None:
    path = f"{MAILBOX}/messages/{{message_id}}/blob"
    places = StreamPlaces(hub.answer_memory, 64, 16, on_unread=partial(hub.metrics.dropped, DOOR))
    owner = owner_by(hub, partial(owner_of_mailbox, hub))
    documented: dict[str, Any] = {"response_class": Response, "responses": _FETCHED}

    @routes.get(path, Action.MAILBOX_READ, None, owner, **documented)
    async def fetch_blob(
        request: Request, realm: RealmPath, name: NamePath, message_id: MessagePath
    ) -> Response:
        """Fetch the content of the blob that a message refers to.

        It can be fetched as long as the message waits, and some time after its end (`limits.blob_keep_s`). The
        answer is 404 for an unknown message, and for one without a blob, and 410 when the blob was removed. A
        content that is damaged ends before its `Content-Length`. With the header `Range` the answer is 206 with
        one part, whose digest nobody has checked: check that of the whole. The `ETag` is good for `If-Range`
        and `If-None-Match`.
        """
        blob = await opened_blob(hub, f"{realm}/{name}/{message_id}")
        headers = _headers(blob.reference)
        try:
            if is_unchanged(request.headers, headers["ETag"]):
                blob.close()
                return Response(b"", 304, headers)
            size = blob.reference.bytes
            wanted = range_of(request.headers, headers["ETag"], size)
            answer = places.answer(
                caller_of(request),
                lambda _: blob.parts() if wanted is None else blob.parts_of(wanted),
                blob.reference.content_type,
                ended=blob.close,
            )
        except BaseException:
            blob.close()
            raise
        if wanted is not None:
            answer.status_code = 206
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.end - 1}/{size}"
            size = wanted.end - wanted.start
        answer.headers.update({**headers, "Content-Length": str(size)})
        return answer


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body. Raises ApiError (400) if the client disconnects before its end."""
    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect:
        raise malformed("the body ended too early") from None


def _headers(reference: BlobReference) -> dict[str, str]:
    """Return the headers of a content and of its parts. `Repr-Digest` is that of the whole (RFC 9530)."""
    digest = base64.b64encode(bytes.fromhex(reference.digest)).decode("ascii")
    return {
        "Accept-Ranges": "bytes",
        "ETag": f'"{reference.digest}"',
        "Repr-Digest": f"sha-256=:{digest}:",
        # A browser must not show what an agent calls a page of ours.
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
    }


def _content_type(request: Request) -> str | None:
    found = request.headers.get("content-type")
    if found is not None and not (
        0 < len(found) <= CONTENT_TYPE_CHARACTERS_MOST and found.isascii() and found.isprintable()
    ):
        raise malformed(f"Content-Type has printable ASCII, {CONTENT_TYPE_CHARACTERS_MOST} characters at most")
    return found


def _announced(request: Request) -> int | None:
    found = request.headers.get("content-length")
    with suppress(TypeError, ValueError):
        return int(str(found)[:19])
    return None


def _nothing() -> None:
    return None
