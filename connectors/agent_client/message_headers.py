"""The HTTP headers that repeat what a JSON-RPC message says, for messages that came without any."""

from __future__ import annotations

from typing import Any

from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
)
from mcp.types import (
    PROTOCOL_VERSION_META_KEY,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)


class MessageHeaders:
    """Follows one connection. The newer protocol says its version in each message, the older one in its
    handshake; over HTTP both say it in a header, too.
    """

    def __init__(self) -> None:
        self._handshakes: set[str | int] = set()
        self._version: str | None = None

    def of_request(self, message: JSONRPCMessage) -> dict[str, str]:
        """The headers of a message on its way to the server."""
        if not isinstance(message, JSONRPCRequest | JSONRPCNotification):
            return self._version_header(self._version)
        if isinstance(message, JSONRPCRequest) and message.method == "initialize":
            self._handshakes.add(message.id)
            return {}
        params = message.params or {}
        meta = params.get("_meta")
        version = meta.get(PROTOCOL_VERSION_META_KEY) if isinstance(meta, dict) else None
        if not isinstance(version, str):
            return self._version_header(self._version)
        headers = self._version_header(version)
        if _is_plain(message.method):
            headers[MCP_METHOD_HEADER] = message.method
        if isinstance(name := params.get(NAME_BEARING_METHODS.get(message.method, "")), str):
            headers[MCP_NAME_HEADER] = encode_header_value(name)
        return headers

    def see_answer(self, message: JSONRPCResponse | JSONRPCError) -> None:
        """Learn the version from the answer to a handshake."""
        if message.id not in self._handshakes:
            return
        self._handshakes.discard(message.id)
        result: Any = message.result if isinstance(message, JSONRPCResponse) else None
        if isinstance(result, dict) and isinstance(version := result.get("protocolVersion"), str):
            self._version = version

    def _version_header(self, version: str | None) -> dict[str, str]:
        return {MCP_PROTOCOL_VERSION_HEADER: version} if version is not None and _is_plain(version) else {}


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and text == text.strip()
