"""The bridge's direction from mailboxes to files: messages of other doors for agents that poll files (FQ-17).

**Reads** the gateway's stream of settled events, and the pending messages of a mailbox: at the start, after a
gap in the stream, and for a new agent. **Guarantees** that a message which the file already has is not appended
again. So it may be killed at any time.

Blobs of the messages become files of the queue (DL-27). **Delivers** a content whole, with the right digest, or
not at all. **Loses** nothing: a message whose blob cannot be fetched stays in its mailbox, and a blob that was
removed is named in the line.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

import structlog

from connectors.doors.file_bridge.bridge import Consumers
from connectors.doors.file_bridge.held_lines import PutOff
from connectors.doors.file_bridge.posting_rules import BridgeRules, ask_limits
from connectors.doors.file_bridge.queue_folder import queue_root, wait_free
from connectors.doors.file_bridge.records import DOOR, line_of, may_be_of
from connectors.plumbing.gateway_client.event_stream import (
    GAP,
    SETTLED,
    SNAPSHOT,
    EventStream,
    ServerEvent,
    log_lost,
)
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.settings.settings import Settings
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_DUE
from schemas.streams.mailboxes.message import DEFAULT_REALM, MESSAGE_POSTED
from schemas.streams.mailboxes.message_text import note_of_blob
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.plans import Request
from trunkline_agent.queue import Queue, QueueError
from trunkline_agent.queue.message_record import (
    BODY_LIMIT,
    blob_in_line,
    is_expired,
    is_for,
    parse_line,
    reference,
)
from trunkline_agent.queue.session_files import MESSAGES, SessionFolder, complete_lines
from trunkline_agent.wire.ids import MAILBOX
from trunkline_agent.wire.verdicts import ACCEPTED

_SILENCE_S: Final = 30.0
_GONE: Final = 410
# Bodies that say nothing beside a blob.
_EMPTY: Final = ("", "{}", "null", '""')
_TEXTS: Final = ("application/json", "application/x-ndjson", "application/xml")


class _BlobGone(Exception):
    """The gateway does not have the blob any more."""


class _BlobNotFetched(QueueError):
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
        _BlobNotFetched: The blob cannot be fetched at present; nothing was appended.
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
    except _BlobGone:
        queue.deliver(line_with_blob(record, message, blob, is_gone=True), session)


def _parts(gateway: GatewayClient, path: str, blob: BlobReference) -> Iterator[bytes]:
    """Yield the content, a part at a time. After the last part its digest is checked.

    Raises _BlobGone, and _BlobNotFetched if it does not come, or not as a whole.
    """
    found, size = hashlib.sha256(), 0

    def refusal_of(status: int, headers: Mapping[str, str], body: bytes) -> Exception:
        if status == _GONE:
            return _BlobGone(path)
        return _BlobNotFetched(f"a blob cannot be fetched: {gateway.error_of(status, headers, body)}")

    try:
        with closing(gateway.parts(Request("GET", path), _SILENCE_S, refusal_of)) as parts:
            for part in filter(None, parts):
                found.update(part)
                size += len(part)
                if size > blob.bytes:
                    break
                yield part
    except TrunklineError as error:
        raise _BlobNotFetched(f"a blob did not come as a whole: {error}") from error
    if size != blob.bytes or found.hexdigest() != blob.digest:
        raise _BlobNotFetched("a blob came with another content than that of its digest")


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


log = structlog.stdlib.get_logger(__name__)

# A page has `limits.answer_bytes` at most, so there may be fewer.
_PAGE: Final = 100
_TICK_S: Final = 0.2
_AGENTS_S: Final = 5.0
_AGAIN_S: Final = 1.0
_LOCK_S: Final = 0.25
# Messages that are due within this time are read together.
_DUE_S: Final = 0.2
_REMEMBERED: Final = 20_000


class MailboxFollower(threading.Thread):
    """A thread that appends messages from mailboxes to the file queue, until `stop` is set.

    It retries after errors of the gateway and of files.

    Args:
        settings: The settings of the queue and the gateway.
        stop: Ends the thread when it is set.
        consumers: The agents that poll the queue. Only their mailboxes are followed.
        rules: The object that gets the limits of mailboxes and senders from this thread.
    """

    def __init__(
        self, settings: Settings, stop: threading.Event, consumers: Consumers, rules: BridgeRules
    ) -> None:
        super().__init__(name="mailbox-follower", daemon=True)
        self._settings = settings
        self._root = str(queue_root(settings))
        self._queue = Queue(self._root)
        self._stopping = stop
        self._consumers = consumers
        self._rules = rules
        self._due: dict[tuple[str, str], float] = {}
        self._synced: set[tuple[str, str]] = set()
        self._handled: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._waiting = PutOff(_tell_waiting)
        self._agents: frozenset[str] | None = None
        self._asked_agents_at = -math.inf

    def agents(self) -> frozenset[str] | None:
        """Return the names of agents with a definition, by the gateway's last answer; None before the first."""
        return self._agents

    def run(self) -> None:
        """Follow the mailboxes until `stop` is set; `start` calls this on the thread."""
        while not self._stopping.is_set():
            try:
                self._follow()
            except (TrunklineError, QueueError, OSError) as error:
                log.warning("mailboxes_wait", why=str(error))
            except Exception:
                log.exception("mailboxes_failed")
            self._stopping.wait(_AGAIN_S)

    def _follow(self) -> None:
        wanted = {"kind": MAILBOX, "type": f"{MESSAGE_POSTED},{MESSAGE_DUE}", "verdict": ACCEPTED}
        self._synced.clear()
        with (
            GatewayClient(self._settings) as gateway,
            EventStream(gateway, path_of("events"), wanted, give_up_s=math.inf, lost=log_lost) as stream,
        ):
            has_snapshot = False
            while not self._stopping.is_set():
                event = stream.next(_TICK_S)
                if event is not None:
                    has_snapshot |= event.name == SNAPSHOT
                    self._take(gateway, event)
                # Only with an open stream: it delivers all messages that arrive later.
                if has_snapshot:
                    self._sync_new(gateway)
                    self._ask_registries(gateway)

    def _take(self, gateway: GatewayClient, event: ServerEvent) -> None:
        if event.name in (GAP, SNAPSHOT):
            self._synced.clear()
        elif event.name == SETTLED and event.data["type"] == MESSAGE_DUE:
            realm, _, name = str(event.data["stream"]).removeprefix(f"{MAILBOX}/").partition("/")
            # The event has no message. The pending ones are read together for all that are due at this time.
            if (realm, name) in self._synced:
                self._due.setdefault((realm, name), time.monotonic() + _DUE_S)
        elif event.name == SETTLED and not str(event.data["principal"]).startswith(f"{DOOR}/"):
            body = event.data["body"]
            # A delayed message is not in the mailbox yet.
            if isinstance(body, dict) and body.get("deliver_after_ms") is None:
                body = {"realm": DEFAULT_REALM, **body}
                session, name = str(body["realm"]), str(body["to"])
                # The session of a consumer that is gone must not be created again.
                if (session, name) in self._synced and self._consumers.has(session, name):
                    with self._on_its_own(session, name):
                        self._deliver(gateway, body, event.data["logged_at"])

    def _sync_new(self, gateway: GatewayClient) -> None:
        now = set(self._consumers.all())
        self._forget(self._synced - now)
        self._waiting.keep(now)
        self._synced -= {key for key, at in self._due.items() if at <= time.monotonic()}
        self._due = {key: at for key, at in self._due.items() if key in self._synced}
        for session, name in sorted(now - self._synced):
            if not self._waiting.waits((session, name)):
                with self._on_its_own(session, name):
                    self._sync(gateway, session, name)
                    self._synced.add((session, name))
                    self._waiting.went_well((session, name))

    @contextmanager
    def _on_its_own(self, session: str, name: str) -> Iterator[None]:
        """Keep an error of one file from the others. Its pending messages are read again later."""
        try:
            yield
        except (QueueError, OSError) as error:
            self._synced.discard((session, name))
            self._waiting.failed((session, name), error)

    def _forget(self, gone: set[tuple[str, str]]) -> None:
        """Forget consumers that are gone. One that comes back gets the messages that are still pending."""
        if gone:
            self._synced -= gone
            for key in [key for key in self._handled if key[:2] in gone]:
                del self._handled[key]

    def _sync(self, gateway: GatewayClient, session: str, name: str) -> None:
        """Append the messages that are pending in a mailbox and not in the file.

        A message whose blob cannot be fetched does not hold up others; _BlobNotFetched is raised at the end.
        """
        after: dict[str, str] = {}
        left: _BlobNotFetched | None = None
        while not self._stopping.is_set():
            path = path_of("mailboxes", session, name)
            page = gateway.get(path, {"pending": "true", "limit": _PAGE, **after})["messages"]
            if not page:
                break
            present = self._in_file(session, name, {row["message_id"] for row in page})
            for row in page:
                if row["message_id"] not in present:
                    # The names of the message's wire model.
                    named = {"from": row["sender"], "to": row["recipient"]}
                    try:
                        self._deliver(gateway, {**row, **named}, row["posted_at"])
                    except _BlobNotFetched as error:
                        left = error
            after = {"after": page[-1]["message_id"]}
        if left is not None:
            raise left

    def _in_file(self, session: str, name: str, message_ids: set[str]) -> set[str]:
        """Return those of these messages that have a line for this agent in the session's file."""
        with SessionFolder(self._root, session, create=False) as folder:
            fd = folder.open_file(MESSAGES)
            if fd is None:
                return set()
            with fd:
                lines = complete_lines(fd, 0, os.fstat(fd).st_size)
                found = (parse_line(line) for _, _, line in lines if may_be_of(line, message_ids))
                # One id may be in several mailboxes.
                mine = {one["msg_id"] for one in found if one is not None and is_for(one, name)}
                return mine & message_ids

    def _deliver(self, gateway: GatewayClient, message: Mapping[str, Any], logged_at: str) -> None:
        session, name = str(message["realm"]), str(message["to"])
        key = (session, name, str(message["message_id"]))
        if key in self._handled:
            return
        try:
            record = line_of(message, logged_at)
            if is_expired(record, time.time()):
                return
            with SessionFolder(self._root, session, create=False) as folder:
                wait_free(folder, _LOCK_S)
            deliver(self._queue, gateway, record, message)
        except ValueError as error:  # no line can represent this message; go on with the next one
            log.warning("message_not_delivered", session=session, msg_id=key[2], why=str(error))
        self._handled[key] = None
        if len(self._handled) > _REMEMBERED:
            self._handled.popitem(last=False)

    def _ask_registries(self, gateway: GatewayClient) -> None:
        """Ask for the agents and the limits every few seconds."""
        if time.monotonic() - self._asked_agents_at < _AGENTS_S:
            return
        shown = gateway.get(path_of("agents"))["agents"]
        self._agents = frozenset(agent["name"] for agent in shown if agent["status"] == "defined")
        self._rules.known = ask_limits(gateway)
        self._asked_agents_at = time.monotonic()


def _tell_waiting(reader: tuple[str, str], why: str) -> None:
    log.warning("reader_waits", session=reader[0], agent=reader[1], why=why)
