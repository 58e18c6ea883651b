"""The HTTP client that the official MCP client uses for an agent.

It signs requests, makes each call unique, and answers outages with JSON-RPC errors. It repeats no request that
the server may have carried out: a request that failed on its way is answered with an error, and the caller
decides.

`ReopeningClient` also opens a session again that the gateway has forgotten, so that a client of the older
protocol outlives a restart of the gateway. The request that it repeats was not carried out: a server that does
not know the session answers 404 before it reads the request.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import httpx2
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.types import RequestId

from trunkline_agent.credentials import CA_VARIABLE
from trunkline_agent.errors import Refused, UsageError
from trunkline_agent.mcp.private_keys import KeyFileError
from trunkline_agent.mcp.signed_auth import SignedAuth
from trunkline_agent.mcp.tool_calls import NONCE, new_nonce
from trunkline_agent.terminal_text import escaped
from trunkline_agent.tls import explained, is_on_this_machine, trust

# Codes of JSON-RPC errors, of the range that is free for applications.
UNREACHABLE: Final = -32050
REFUSED: Final = -32051
KEY_UNUSABLE: Final = -32052
CONNECT_S: Final = 5.0
# The server sends on an open stream, and during a call that waits, at least every 15 s. So a silence of this
# length is an outage.
READ_S: Final = 60.0
_NAMES: Final = {UNREACHABLE: "unreachable", REFUSED: "refused", KEY_UNUSABLE: "key_unusable"}
_JSON: Final = "application/json"
_TEXT_LIMIT: Final = 300
_CALL: Final = "tools/call"
_CANCELLED: Final = "notifications/cancelled"
# The key of the JSON-RPC message among a request's extensions.
_DOCUMENT: Final = "trunkline_document"


class AgentHttpClient(httpx2.AsyncClient):
    """An HTTP client for the official MCP client, which signs requests and reports outages as JSON-RPC errors.

    Each `tools/call` gets a nonce in its `_meta`. So no two calls have the same bytes, even from different
    processes of one agent.

    Without this class, an outage during one request would end the whole session of the official client. Here
    only the request fails: it is answered with status 503 and a JSON-RPC error. The error's code is
    UNREACHABLE, REFUSED or KEY_UNUSABLE.

    A notification that cancels a call also closes the call's connection. The official client does so only in
    the newer protocol, and no other sign of a cancellation reaches a server without sessions.

    Args:
        url: The address of the server.
        auth: The signature of the requests.
        read_s: The longest time in seconds in which the server may send no byte of its answer.
        ca_certs: The file with the authority that signed the server's certificate. None means the file that
            TRUNKLINE_CA_CERTS names, else the authorities of the machine.
    """

    def __init__(self, url: str, auth: SignedAuth, read_s: float = READ_S, ca_certs: str | None = None) -> None:
        super().__init__(
            auth=auth,
            timeout=httpx2.Timeout(CONNECT_S, read=read_s),
            # Without TLS nothing is verified, and no time is spent on loading certificates.
            verify=trust(url, ca_certs or os.environ.get(CA_VARIABLE)) or False,
            trust_env=not is_on_this_machine(url),
        )
        self._calls: dict[RequestId, anyio.CancelScope] = {}

    def build_request(self, method: str, url: Any, **options: Any) -> httpx2.Request:
        """Return a new request, as `httpx2.AsyncClient` does, with a nonce if it calls an MCP tool."""
        if isinstance(document := options.get("json"), dict):
            options["json"] = with_nonce(document)
            options["extensions"] = {**(options.get("extensions") or {}), _DOCUMENT: document}
        return super().build_request(method, url, **options)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request once and return the server's answer.

        Errors of the connection or the key raise nothing. Without an answer, or after a refusal, this method
        makes an answer itself. It has an HTTP error status and a JSON-RPC error with the code UNREACHABLE,
        REFUSED or KEY_UNUSABLE.
        """
        document = request.extensions.get(_DOCUMENT, {})
        if document.get("method") == _CANCELLED:
            cancelled = cancelled_request_id_from_params(document.get("params"))
            if cancelled is not None and (call := self._calls.get(cancelled)) is not None:
                call.cancel()
        identity = document.get("id") if document.get("method") == _CALL else None
        if identity is None:
            return await self._answered(request, options)
        with anyio.CancelScope() as call:
            self._calls[identity] = call
            try:
                return await self._answered(request, options)
            finally:
                if self._calls.get(identity) is call:
                    del self._calls[identity]
        return _failure(request, REFUSED, "the call was cancelled")

    async def _answered(self, request: httpx2.Request, options: dict[str, Any]) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
            # Read the body here, where a broken connection can still be reported.
            if response.headers.get("content-type", "").startswith(_JSON) or response.status_code >= 400:
                await response.aread()
        except KeyFileError as error:
            return _failure(request, KEY_UNUSABLE, str(error))
        except Refused as error:
            return _failure(request, REFUSED, str(error))
        except httpx2.TransportError as error:
            why = explained(error) if "CERTIFICATE" in str(error) else type(error).__name__
            return _failure(request, UNREACHABLE, f"the gateway does not answer ({why})")
        return _explained(request, response)


def with_nonce(document: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON-RPC message with a new random nonce, if the message is a call of a tool.

    `document` is the decoded message. Any other message is returned itself, without a copy.
    """
    if document.get("method") != _CALL or not isinstance(params := document.get("params"), dict):
        return document
    meta = params.get("_meta")
    nonce = {**(meta if isinstance(meta, dict) else {}), NONCE: new_nonce()}
    return {**document, "params": {**params, "_meta": nonce}}


def endpoint(url: str, path: str) -> str:
    """Return the address of the MCP endpoint for an address that a user gave.

    An address without a path gets the path `path`, such as `/mcp`. An address with a path is returned
    unchanged. Raises UsageError for a text that is no HTTP address.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError("the address of the agent MCP server is http://host:port")
    return url if parts.path.strip("/") else parts._replace(path=path).geturl()


def _explained(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    """Return the response, or a JSON-RPC error for a status of 400 and above that has none."""
    status = response.status_code
    # The transports recognize a server of the older protocol, and a closed session, by a bare 404.
    if status < 400 or status == 404:
        return response
    told: Any = None
    if response.headers.get("content-type", "").startswith(_JSON):
        with contextlib.suppress(ValueError):
            told = response.json()
    text = response.text
    if isinstance(told, dict):
        if "jsonrpc" in told:
            return response
        # The form of the gateway's own errors.
        if isinstance(told.get("message"), str):
            text = told["message"]
    text = f"the gateway answers {status}: {escaped(text[:_TEXT_LIMIT])}"
    return _failure(request, UNREACHABLE if status >= 500 else REFUSED, text, status)


def _failure(request: httpx2.Request, code: int, text: str, status: int = 503) -> httpx2.Response:
    error = {"code": code, "message": text, "data": {"reason": _NAMES[code]}}
    return httpx2.Response(status, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)


_SESSION: Final = "mcp-session-id"
_VERSION: Final = "mcp-protocol-version"
_NOT_FOUND: Final = 404


class ReopeningClient(AgentHttpClient):
    """An HTTP client that opens its MCP session again when the server has forgotten it, as after a restart.

    The official MCP client keeps the id of the first session. This class replaces it in each request by the id
    of the session that is open now.
    """

    def __init__(self, url: str, auth: SignedAuth, ca_certs: str | None = None) -> None:
        super().__init__(url, auth, ca_certs=ca_certs)
        self._opening: bytes | None = None
        self._current: dict[str, str] = {}
        self._one_at_a_time = anyio.Lock()

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request in the open session and return the server's answer.

        If the server does not know the session, a new one is opened, and the request is sent again. If no new
        session can be opened, the answer has the status 404. Errors of the connection or the key become an
        answer, as in `AgentHttpClient.send`.
        """
        asked = request.headers.get(_SESSION)
        if asked is None:
            response = await super().send(request, **options)
            if _SESSION in response.headers and response.is_success:
                self._opening = request.content
            return response
        used = request.headers[_SESSION] = self._current.get(asked, asked)
        response = await super().send(request, **options)
        if response.status_code != _NOT_FOUND or request.method == "DELETE":
            return response
        async with self._one_at_a_time:
            # Of several requests that fail together, the first one opens the session for all.
            if self._current.get(asked, asked) == used and not await self._reopened(request, asked):
                return response
        again = httpx2.Request(request.method, request.url, headers=request.headers, content=request.content)
        again.extensions = request.extensions
        again.headers[_SESSION] = self._current[asked]
        return await super().send(again, **options)

    async def _reopened(self, request: httpx2.Request, asked: str) -> bool:
        if self._opening is None:
            return False
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        opening = self.build_request("POST", request.url, content=self._opening, headers=headers)
        opened = await super().send(opening)
        if not opened.is_success or _SESSION not in opened.headers:
            return False
        headers[_SESSION] = opened.headers[_SESSION]
        if _VERSION in request.headers:
            headers[_VERSION] = request.headers[_VERSION]
        ready = json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
        told = await super().send(self.build_request("POST", request.url, content=ready, headers=headers))
        if told.is_success:
            self._current[asked] = opened.headers[_SESSION]
        return told.is_success
