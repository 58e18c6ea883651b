"""The pump's requests to the gateway (XP-08): start, lease, settle, history.

Any gateway of the log can answer them.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
import orjson

from connectors.doors.xml_pump.handlers import ConversationMessage
from connectors.plumbing.gateway_client.gateway_access import explained, read_token, trust
from connectors.plumbing.network.rates import Backoff
from connectors.plumbing.xml_payloads.deliveries import LeasedMessage, ListenerInfo, leased_from, listener_from
from schemas.settings.settings import Settings
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError, UsageError

_CONNECT_S: Final = 5.0
# The next address of the host is tried after this time (RFC 8305, section 5).
_NEXT_ADDRESS_S: Final = 0.25
# Shorter than the time for which the gateway keeps an idle connection.
_IDLE_S: Final = 30.0
_HEAD_LIMIT: Final = 64 * 1024
_BODY_LIMIT: Final = 64 * 1024 * 1024


class HttpAnswer(NamedTuple):
    """The HTTP status and the body of an answer."""

    status: int
    body: bytes


class _Kept(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    since: float


class HttpConnections:
    """A small HTTP/1.1 client for one server and one event loop, with one connection for each open request.

    It supports persistent connections and JSON bodies, nothing else. The pump asks the gateway some hundred
    times a second and shares its machine. A request takes 0.05 ms of processor time here and 0.8 ms with httpx2
    (measured with four requests at a time and answers of 600 bytes).

    Args:
        url: The server's address, `http` or `https`. UsageError is raised for any other.
        token: The bearer token to send; None sends none.
        ca_certs: The file with the authority that signed the server's certificate; None for the machine's own.
    """

    def __init__(self, url: str, token: str | None, ca_certs: Path | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"gateway.url: expected http://host:port, found {url!r}")
        self._tls = trust(url, ca_certs)
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        if token is not None:
            self._head += f"Authorization: Bearer {token}\r\n"
        self._idle: deque[_Kept] = deque()

    async def ask(
        self, method: str, path: str, body: bytes | None, timeout_s: float, request_id: str | None = None
    ) -> HttpAnswer:
        """Send one request and return its answer, whatever its status. Does not retry.

        Args:
            method: The HTTP method.
            path: The path below the server's address.
            body: The JSON body; None sends none.
            timeout_s: The longest time in seconds for connection, request and answer together.
            request_id: The value of the header Idempotency-Key; None sends none.

        Raises:
            BackboneUnreachable: There is no answer. The server may or may not have carried out the request.
        """
        lines = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
        if request_id is not None:
            lines += f"Idempotency-Key: {request_id}\r\n"
        if body is not None:
            lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"{lines}\r\n".encode("ascii") + (body or b"")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(request)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
            if isinstance(error, ssl.SSLError):
                why = explained(error)
            raise BackboneUnreachable(f"the gateway does not answer ({why})") from None

    def close(self) -> None:
        """Close the connections that no request uses. Call this when no request is open."""
        while self._idle:
            writer = self._idle.pop().writer
            # A TLS connection would wait for the closing handshake of its peer.
            writer.close() if self._tls is None else writer.transport.abort()

    async def _ask(self, request: bytes) -> HttpAnswer:
        kept = self._take_idle()
        if kept is None:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self._host,
                    self._port,
                    ssl=self._tls,
                    limit=_HEAD_LIMIT,
                    happy_eyeballs_delay=_NEXT_ADDRESS_S,
                )
            kept = _Kept(reader, writer, 0.0)
        is_kept = False
        try:
            kept.writer.write(request)
            await kept.writer.drain()
            answer, is_kept = await _read_answer(kept.reader)
        finally:
            # Close it also on cancellation: a connection with half an answer cannot be reused.
            if is_kept:
                self._idle.append(kept._replace(since=time.monotonic()))
            else:
                kept.writer.close()
        return answer

    def _take_idle(self) -> _Kept | None:
        while self._idle:
            kept = self._idle.pop()
            if time.monotonic() - kept.since < _IDLE_S and not kept.reader.at_eof():
                return kept
            kept.writer.close()
        return None


async def _read_answer(reader: asyncio.StreamReader) -> tuple[HttpAnswer, bool]:
    """Return the answer, and whether the connection can be reused. Raises ValueError for other protocols."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise ValueError("a head without an end") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ValueError("no HTTP/1.1")
    fields = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    length = headers.get("content-length", "")
    if not length.isdecimal() or int(length) > _BODY_LIMIT:
        raise ValueError("an answer of unknown length")
    body = await reader.readexactly(int(length))
    is_kept = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return HttpAnswer(int(rest[:3]), body), is_kept


_PUMP: Final = "/api/hub/pump"
_LISTENERS: Final = "/api/hub/listeners"
_MARGIN_S: Final = 20.0
# The pauses while the gateway is away: the first, and the longest.
AWAY_S: Final = (0.1, 2.0)
_AWAY: Final = frozenset({408, 429, 502, 503, 504})


class NotTaken(TrunklineError):
    """The gateway refused a request of the pump, and would refuse the same request again."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to a request for messages.

    Attributes:
        version: The organism's version. If it has changed, the pump loads its listeners again.
        redelivered: How many waiting messages were leased before, perhaps by a pump that died of them.
        messages: The leased messages. It may be empty.
    """

    version: int
    redelivered: int
    messages: Sequence[LeasedMessage]


class GatewayLink:
    """A pump's requests to the gateway that the settings name, with the operator's token.

    Use it in one event loop. Each method but `close` sends one request. It raises BackboneUnreachable when the
    gateway or Kafka does not answer; only `history` retries then. It raises Refused when the gateway does not
    accept the token, and NotTaken when the gateway refuses the request for any other reason. The argument
    `pump` is the pump's name, under which the gateway stores its leases.
    """

    def __init__(self, settings: Settings) -> None:
        self._http = HttpConnections(settings.gateway_url, read_token(settings), settings.gateway.ca_certs)
        self._timeout_s = settings.gateway.settle_timeout_s + _MARGIN_S

    async def started(self, pump: str) -> int:
        """Report that a pump has started, and return how many messages went back to their mailboxes.

        These are the messages that an earlier pump with the same name had leased and not reported. Raises
        BackboneUnreachable when the gateway or Kafka does not answer, and Refused when the gateway does not
        accept the token.
        """
        answer = await self._ask(f"{_PUMP}/started", {"pump": pump})
        return int(answer["released"])

    async def listeners(self) -> tuple[int, Sequence[ListenerInfo]]:
        """Return the organism's version, and the descriptions of its active listeners.

        Raises BackboneUnreachable when the gateway does not answer, and Refused when it does not accept the
        token.
        """
        version, rows = None, list[Any]()
        while True:
            place = f"?after={quote(rows[-1]['listener'])}" if rows else ""
            answer = await self._ask(f"{_LISTENERS}{place}")
            if rows and answer["version"] != version:
                rows = []
                continue
            version = answer["version"]
            rows += answer["listeners"]
            if not answer.get("left"):
                return int(version), [listener_from(row) for row in rows]

    async def lease(
        self, pump: str, wants: Mapping[str, int], free: int, wait_ms: int, version: int, *, alone: bool
    ) -> Leased:
        """Lease messages to handle. If there are none, wait for the first one, up to `wait_ms` milliseconds.

        Args:
            pump: The name of the pump, which gets the leases.
            wants: For each listener, by name, the largest number of messages to lease for it.
            free: The largest number of messages in all.
            wait_ms: The longest wait. After it, the answer has no messages.
            version: The version of the organism that the pump has loaded.
            alone: Whether to lease a message that was leased before, instead of new ones.

        Raises:
            BackboneUnreachable: The gateway or Kafka does not answer. Messages may have been leased even so.
            Refused: The gateway does not accept the token.
        """
        places = {"wants": wants, "free": free, "alone": alone}
        asked = {"pump": pump, **places, "wait_ms": wait_ms, "version": version}
        answer = await self._ask(f"{_PUMP}/lease", asked, wait_ms / 1000)
        found = [leased_from(message) for message in answer["messages"]]
        return Leased(int(answer["version"]), int(answer["suspects"]), found)

    async def settle(
        self, pump: str, done: Sequence[Mapping[str, Any]], request_id: str
    ) -> Sequence[Mapping[str, Any]]:
        """Report the outcomes of messages, and return the gateway's verdict on each.

        Args:
            pump: The name of the pump that leased the messages.
            done: The outcomes with their answers, as `Done.as_json` returns them.
            request_id: The id of this report, sent as its idempotency key. A repeated report has no further
                effect because of the ids of the leases in it: the first report has ended these leases.

        Returns:
            One object for each message, with `message_id`, `verdict` and `reason`.

        Raises:
            BackboneUnreachable: The gateway or Kafka does not answer. Repeat the report.
            NotTaken: The gateway refuses the report as a whole.
        """
        answer = await self._ask(f"{_PUMP}/settle", {"pump": pump, "done": done}, request_id=request_id)
        return list(answer["results"])

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[ConversationMessage]:
        """Return the newest `limit` messages of a listener's conversation `thread`, oldest first.

        `thread` is the id that the listener's messages carry. The result is empty for an unknown conversation.
        While the gateway does not answer, it retries without limit: the caller cancels it, for example after
        the handler's time limit.
        """
        asked = {"listener": listener, "thread": thread, "limit": limit}
        backoff = Backoff(*AWAY_S)
        while True:
            try:
                answer = await self._ask(f"{_PUMP}/history", asked)
                return msgspec.convert(answer["messages"], list[ConversationMessage])
            except BackboneUnreachable:
                # The handler has time, and no other way to read the conversation.
                await asyncio.sleep(backoff.next_s())

    def close(self) -> None:
        """Close the connections to the gateway. Call this when no request is open."""
        self._http.close()

    async def _ask(
        self, path: str, body: Mapping[str, Any] | None = None, wait_s: float = 0, request_id: str | None = None
    ) -> Any:
        """Return the decoded answer to a GET, or with a body to a POST; `wait_s` is the gateway's own time."""
        method, content, key = "GET", None, None
        if body is not None:
            # The gateway reads canonical JSON in a quarter of the time.
            content = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
            method, key = "POST", request_id or uuid.uuid4().hex
        answer = await self._http.ask(method, path, content, self._timeout_s + wait_s, key)
        if answer.status in (200, 201, 202):
            try:
                return orjson.loads(answer.body)
            except ValueError:
                raise BackboneUnreachable("the server that answers is not a Trunkline gateway") from None
        why = f"the gateway answers {answer.status} ({_reason(answer.body)}) to {method} {path}"
        if answer.status in _AWAY:
            raise BackboneUnreachable(why)
        if answer.status in (401, 403):
            raise Refused(f"{why}; a pump needs the operator's token")
        raise NotTaken(why)


def _reason(body: bytes) -> str:
    """Return the reason in an answer, without its message, which may quote the request."""
    try:
        reason = orjson.loads(body)["reason"]
    except (ValueError, KeyError, TypeError):
        return "no reason"
    return reason if isinstance(reason, str) and reason.isidentifier() else "no reason"
