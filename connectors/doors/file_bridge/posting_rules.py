"""The limits of mailboxes and senders for the lines that the bridge posts (LM-08), and too long bodies.

**Reads** `GET /api/hub/limits` and `/listeners`, and `GET /api/hub/principals` for limits of roles. **Owns**
the rates of this bridge: it counts what each sender sends through the files, as each gateway does for itself.

The fold refuses a posting that exceeds the limits in it, and then the line must stay in its file. So a posting
has limits only while the gateway's verdicts arrive. Otherwise the lines of recipients whose mailboxes have
limits of their own stay in the file, because those count without a gateway, too.

A body that is too long for a record becomes a blob at the gateway (DL-27). **Reads** a side-file twice: for its
digest a part at a time, and for the upload, 16 MiB at most. **Delivers** a reference only after the gateway has
stored the blob. **Loses** nothing: without a gateway the line waits, and a bridge that is killed uploads the
same blob again.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import structlog

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream
from connectors.plumbing.network.rates import Backoff, TokenBuckets
from schemas.effects.recipients import Limits, limits_of
from schemas.settings.settings import Settings
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.control.limits import NAME, ROLE, LimitRow
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.mailboxes.message_text import FILE_BLOB_TYPE
from schemas.streams.principal.principals import PrincipalRow
from schemas.wire.record import Position
from trunkline_agent.errors import RateLimited, TrunklineError
from trunkline_agent.hub.plans import Request, Retries, exchange
from trunkline_agent.queue.message_record import BODY_LIMIT, side_file_of
from trunkline_agent.queue.session_files import BODIES, CHUNK_BYTES, SessionFolder
from trunkline_agent.queue.side_files import with_body
from trunkline_agent.wire.verdicts import MAILBOX_FULL, RATE_LIMITED

# The reason why a line waits although its mailbox may have room.
NO_VERDICT: Final = "no_verdict"
# The reason why a line with a long body waits: its blob cannot be stored.
NO_GATEWAY: Final = "no_gateway"
# A posting waits so long for its verdict.
VERDICT_WAIT_S: Final = 10.0


class KnownLimits:
    """The limits that the gateway has answered, for principals and other names.

    Args:
        rows: The rows of `registry_limits` as JSON.
        roles: The roles of principals by name. Any other name counts as an agent's.
        listeners: The names of the listeners of the XML pump.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        roles: Mapping[str, str],
        listeners: Collection[str] = (),
    ) -> None:
        self.listeners = frozenset(listeners)
        self._rows = {f"{row['scope']}/{row['name']}": SimpleNamespace(**row) for row in rows}
        self._roles = roles
        self.own_mailboxes = frozenset(
            str(row["name"])
            for row in rows
            if row["scope"] == NAME and not (row["pending_most"] is None and row["bytes_most"] is None)
        )

    def of(self, name: str) -> Limits:
        """Return the limits of a principal, an agent or a listener."""
        return limits_of(self._get, name)

    def _get(self, row_type: type[Any], key: str) -> Any:
        if row_type is LimitRow:
            return self._rows.get(key)
        role = self._roles.get(key)
        if row_type is PrincipalRow:
            return None if role is None else SimpleNamespace(role=role)
        return key


def ask_limits(gateway: GatewayClient) -> KnownLimits:
    """Ask the gateway for all limits and listeners. Raises TrunklineError if it does not answer, or refuses."""
    rows = gateway.get(path_of("limits"))["limits"]
    roles: dict[str, str] = {}
    if any(row["scope"] == ROLE for row in rows):
        principals = gateway.get(path_of("principals"))["principals"]
        roles = {row["principal"]: row["role"] for row in principals}
    listeners = [row["listener"] for row in gateway.get(path_of("listeners"))["listeners"]]
    known = [{name: row.get(name) for name in ("scope", "name", *Limits._fields)} for row in rows]
    return KnownLimits(known, roles, listeners)


class BridgeRules:
    """The rules of one bridge. One thread replaces `known`, and the bridge's thread asks.

    Args:
        verdicts: The gateway's verdicts on postings of the files.
    """

    def __init__(self, verdicts: VerdictStream) -> None:
        self.known: KnownLimits | None = None
        self.own_before: Collection[str] = ()
        """The mailboxes of the realm `default` with limits of their own, while the gateway has not answered."""
        self._verdicts = verdicts
        self._sees_verdicts = False
        self._rates: TokenBuckets[tuple[str, str]] = TokenBuckets(1, 1)

    @property
    def is_complete(self) -> bool:
        """True if the limits are known, and verdicts arrive."""
        return self.known is not None and self._verdicts.up

    @property
    def own_mailboxes(self) -> Collection[str]:
        """The mailboxes of the realm `default` that have limits of their own."""
        return self.own_before if self.known is None else self.known.own_mailboxes

    def begin(self) -> None:
        """Find out whether verdicts arrive. The answer counts for all postings until the next call."""
        self._sees_verdicts = self._verdicts.up

    def reasons(self, positions: Sequence[Position]) -> list[str | None]:
        """Wait for the verdicts on records, and return for each why its line must be carried again, or None.

        A full mailbox is a reason, and so is a verdict that does not arrive in time. A record that was rejected
        for another reason would be rejected again. While no verdicts arrive, postings have no limits, and
        all is None.
        """
        if not self._sees_verdicts:
            return [None] * len(positions)
        found: list[str | None] = [NO_VERDICT] * len(positions)
        answers = threading.Semaphore(0)

        def take(place: int, verdict: str | None, reason: str | None) -> None:
            if verdict is not None:
                found[place] = MAILBOX_FULL if reason == MAILBOX_FULL else None
            answers.release()

        for place, position in enumerate(positions):
            self._verdicts.ask(position, partial(take, place))
        # Each question is answered once, after `VERDICT_WAIT_S` at the latest.
        for _ in positions:
            answers.acquire()
        return found

    def limits(self, recipient: str) -> Mapping[str, int | None]:
        """Return the limits of a mailbox as fields of `Message`.

        They are empty for no limits, and while no verdicts arrive.
        """
        if self.known is None or not self._sees_verdicts:
            return {}
        return self.known.of(recipient).of_mailbox

    def takes_blobs(self, session: str, recipient: str) -> bool:
        """Return whether a recipient can fetch blobs: whether it is no listener of the XML pump."""
        return session != DEFAULT_REALM or self.known is None or recipient not in self.known.listeners

    def refusal(self, session: str, recipient: str, sender: str, body_bytes: int) -> str | None:
        """Count a posting among those of its sender and return None, or the reason why it must wait.

        `body_bytes` is the length of its body in UTF-8.
        """
        if session == DEFAULT_REALM and recipient in self.own_mailboxes and not self._sees_verdicts:
            return NO_VERDICT
        if self.known is None:
            return None
        limits = self.known.of(sender)
        for what, count, per_minute in (
            ("messages", 1, limits.messages_per_minute),
            ("bytes", body_bytes, limits.bytes_per_minute),
        ):
            # A body above the rate of a minute takes the whole minute: it would wait for ever.
            if per_minute is not None and self._rates.take((sender, what), min(count, per_minute), per_minute):
                return RATE_LIMITED
        return None


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
