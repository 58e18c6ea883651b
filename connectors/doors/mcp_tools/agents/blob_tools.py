"""The functions behind the MCP tools of blobs (DL-25): large contents in parts, because a call has a limit.

**Delivers** a content as a whole, or an error. **Acknowledges when** the last part has come, and the content is
stored. **Loses** nothing after that. The parts before it are at the gateway that got the first one, for a
minute after the newest one; another gateway, or the same one after a restart, does not know the upload.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
from typing import Any, Final

from connectors.doors.mcp_tools.agents.signed_requests import DOOR, IS_EVENT
from connectors.doors.mcp_tools.agents.tool_arguments import DEFAULT_BLOB_PART, ReadBlob, UploadBlob
from connectors.hub.blobs.blob_store import Draft
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError, malformed, not_found
from connectors.hub.serving.identities import Origin
from connectors.operations.blobs.blobs import Uploads, not_stored, opened_blob, stored_blob, too_large
from connectors.operations.rules.hub_policy import check_rate
from connectors.operations.rules.read_marks import is_shown
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.message import DEFAULT_REALM, MessageBodyRow, MessageRow
from schemas.streams.mailboxes.message_text import shown_text
from trunkline_agent.wire.verdicts import SEQ_CONFLICT, TOO_LARGE

_UTF_8: Final = "text/plain; charset=utf-8"
PART_TIMEOUT_S: Final = 60.0
"""An upload without a further part for so many seconds is dropped."""


class _Upload:
    """An upload in parts. `lock` is held while a part is written, and `timer` drops the upload."""

    def __init__(self, agent: str, draft: Draft) -> None:
        self.agent = agent
        self.draft = draft
        self.lock = asyncio.Lock()
        self.timer: asyncio.TimerHandle | None = None


class BlobTools:
    """The functions of these tools: one method for each tool, with the tool's name; see `AgentTools`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._uploads = Uploads(hub)
        self._begun: dict[str, _Upload] = {}

    async def upload_blob(self, agent: str, asked: UploadBlob) -> dict[str, Any]:
        """Store a part of a content, or all of it.

        Returns `uploadId` and `bytes`, or after the last part the blob. A part that comes again is not stored
        again.

        Raises:
            ApiError: 400 for a part that is no base64, 404 for an unknown upload, 409 for a part that does not
                follow the stored ones, 413 for too large a part or content, 429 if the agent has sent too many
                bytes, 503 if too many uploads run or the content cannot be stored.
            BackboneUnreachable: Kafka is unreachable, or the record was not settled in time.
        """
        part = self._part_of(asked.content)
        upload_id = asked.upload_id or secrets.token_hex(12)
        if asked.upload_id is None:
            if asked.offset:
                raise malformed("offset: the first part of an upload begins at 0")
            upload = _Upload(agent, await self._uploads.begin(agent))
            self._begun[upload_id] = upload
        else:
            known = self._begun.get(upload_id)
            if known is None or known.agent != agent:
                raise not_found("this gateway has no such upload: it took too long; begin it again")
            upload = known
        async with upload.lock:
            if upload.timer is not None:
                upload.timer.cancel()
            try:
                answer = await self._add(upload_id, upload, part, asked)
            except BaseException as error:
                if not (isinstance(error, ApiError) and error.reason == SEQ_CONFLICT):
                    self._drop(upload_id)
                if isinstance(error, OSError):
                    raise not_stored(error) from error
                raise
            finally:
                if upload_id in self._begun:
                    loop = asyncio.get_running_loop()
                    upload.timer = loop.call_later(PART_TIMEOUT_S, self._drop, upload_id)
            return answer

    async def _add(self, upload_id: str, upload: _Upload, part: bytes, asked: UploadBlob) -> dict[str, Any]:
        draft, most = upload.draft, self._hub.settings.limits.blob_bytes
        if upload_id not in self._begun:
            raise not_found("this gateway has no such upload: it took too long; begin it again")
        is_repeated = asked.offset + len(part) <= draft.size and asked.offset < draft.size
        if not is_repeated and asked.offset != draft.size:
            raise ApiError(409, SEQ_CONFLICT, f"the next part begins at {draft.size}")
        if not is_repeated:
            if draft.size + len(part) > most:
                raise too_large(most)
            check_rate(self._hub, upload.agent, len(part), 0, "upload_blob")
            await asyncio.to_thread(draft.write, part)
        if not asked.is_last:
            return {"uploadId": upload_id, "bytes": draft.size}
        origin: Origin = {"door": DOOR, "principal": upload.agent}
        settled = await self._uploads.finish(draft, asked.content_type, origin, asked.digest)
        self._drop(upload_id)
        row = stored_blob(self._hub, settled)
        return {
            "digest": row.digest,
            "bytes": row.bytes,
            "contentType": row.content_type,
            "keepUntil": row.keep_until // 1000,
        }

    async def read_blob(self, agent: str, asked: ReadBlob) -> dict[str, Any]:
        """Return a part of the blob of a message in the agent's own mailbox, in base64.

        Of a message without a blob, it is a part of its content. `digest` is the SHA-256 of the whole, for the
        agent to check.

        Raises:
            ApiError: 404 for an unknown or expired message, 410 if the blob was removed, 503 if the
                store does not answer.
            BackboneUnreachable: The live view does not catch up with the log in time.
        """
        key = f"{DEFAULT_REALM}/{agent}/{asked.message_id}"
        limit = min(asked.limit, self._hub.settings.limits.payload_bytes)
        if IS_EVENT.get():
            limit = min(limit, DEFAULT_BLOB_PART)
        row, body = self._hub.live_view.get(MessageRow, key), self._hub.live_view.get(MessageBodyRow, key)
        is_own = row is not None and row.blob is None and is_shown(row, self._hub.log_clock.now_us())
        if is_own and body is not None:
            return _part_of_text(shown_text(body.body, body.content_type)[0].encode(), asked.offset, limit)
        blob = await opened_blob(self._hub, key)
        try:
            part = await asyncio.to_thread(blob.part, asked.offset, limit)
        finally:
            blob.close()
        return _part_shown(part, asked.offset, blob.reference)

    def _part_of(self, content: str) -> bytes:
        try:
            part = base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            raise malformed("content: not base64") from None
        most = self._hub.settings.limits.payload_bytes
        if len(part) > most:
            raise ApiError(413, TOO_LARGE, f"a part has at most {most} bytes, this one {len(part)}")
        return part

    def _drop(self, upload_id: str) -> None:
        """End an upload, and delete its bytes unless they are stored. Nothing happens for an ended one."""
        upload = self._begun.pop(upload_id, None)
        if upload is None:
            return
        if upload.timer is not None:
            upload.timer.cancel()
        self._uploads.drop(upload.draft, upload.agent)


def _part_of_text(content: bytes, offset: int, limit: int) -> dict[str, Any]:
    """Return a part of a message's own content, as `read_blob` does."""
    digest = hashlib.sha256(content).hexdigest()
    reference = BlobReference(digest=digest, bytes=len(content), content_type=_UTF_8)
    return _part_shown(content[offset : offset + limit], offset, reference)


def _part_shown(part: bytes, offset: int, whole: BlobReference) -> dict[str, Any]:
    return {
        "content": base64.b64encode(part).decode("ascii"),
        "offset": offset,
        "isLast": offset + len(part) >= whole.bytes,
        "digest": whole.digest,
        "bytes": whole.bytes,
        "contentType": whole.content_type,
    }
