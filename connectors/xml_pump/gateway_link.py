"""The pump's requests to the gateway (XP-08): start, lease, settle, history.

Any gateway of the log can answer them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from connectors.gateway_client.operator_token import read_token
from connectors.xml_payloads.deliveries import LeasedMessage, ListenerInfo, leased_from, listener_from
from connectors.xml_pump.handlers import ConversationMessage
from connectors.xml_pump.http_connection import HttpConnections
from schemas.errors import BackboneUnreachable, Refused, TrunklineError
from schemas.settings.settings import Settings

_PUMP: Final = "/api/hub/pump"
_LISTENERS: Final = "/api/hub/listeners"
_MARGIN_S: Final = 20.0
_AWAY_S: Final = (0.1, 2.0)
_AWAY: Final = frozenset({408, 429, 502, 503, 504})


class NotTaken(TrunklineError):
    """The gateway refuses this request and would refuse it again."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to a lease. `redelivered` is the number of waiting messages that were leased before."""

    version: int
    redelivered: int
    messages: Sequence[LeasedMessage]


class GatewayLink:
    """A pump's requests to the gateway that the settings name, with the operator's token.

    Each raises BackboneUnreachable while there is no gateway or no Kafka, Refused when the token lacks the
    right, and NotTaken when the request itself is wrong.
    """

    def __init__(self, settings: Settings) -> None:
        self._http = HttpConnections(settings.gateway_url, read_token(settings), settings.gateway.ca_certs)
        self._timeout_s = settings.gateway.settle_timeout_s + _MARGIN_S

    async def started(self, pump: str) -> int:
        """Begin, give back the messages that an earlier pump of this name held, and return their number."""
        answer = await self._post(f"{_PUMP}/started", {"pump": pump})
        return int(answer["released"])

    async def listeners(self) -> tuple[int, Sequence[ListenerInfo]]:
        """Return the organism's version and the active listeners."""
        answer = await self._ask("GET", _LISTENERS, None, self._timeout_s)
        return int(answer["version"]), [listener_from(row) for row in answer["listeners"]]

    async def lease(
        self, pump: str, wants: Mapping[str, int], free: int, wait_ms: int, version: int, *, alone: bool
    ) -> Leased:
        """Return messages to handle; wait up to `wait_ms` for one."""
        asked = {"pump": pump, "wants": wants, "free": free, "alone": alone, "wait_ms": wait_ms}
        asked["version"] = version
        answer = await self._post(f"{_PUMP}/lease", asked, wait_ms / 1000)
        found = [leased_from(message) for message in answer["messages"]]
        return Leased(int(answer["version"]), int(answer["suspects"]), found)

    async def settle(
        self, pump: str, done: Sequence[Mapping[str, Any]], request_id: str
    ) -> Sequence[Mapping[str, Any]]:
        """Report the outcome of messages. The same outcome with the same id is the same request."""
        answer = await self._post(f"{_PUMP}/settle", {"pump": pump, "done": done}, request_id=request_id)
        return list(answer["results"])

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[ConversationMessage]:
        """Return the messages of a conversation, oldest first.

        While the gateway is away it waits, as long as the handler's time limit lets it.
        """
        asked = {"listener": listener, "thread": thread, "limit": limit}
        wait_s = _AWAY_S[0]
        while True:
            try:
                answer = await self._post(f"{_PUMP}/history", asked)
                break
            except BackboneUnreachable:
                # The handler has time, and no other way to read the conversation.
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _AWAY_S[1])
        return msgspec.convert(answer["messages"], list[ConversationMessage])

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    async def _post(
        self, path: str, body: Mapping[str, Any], wait_s: float = 0.0, request_id: str | None = None
    ) -> Any:
        key = request_id or uuid.uuid4().hex
        return await self._ask("POST", path, orjson.dumps(body), self._timeout_s + wait_s, key)

    async def _ask(
        self, method: str, path: str, body: bytes | None, timeout_s: float, request_id: str | None = None
    ) -> Any:
        answer = await self._http.ask(method, path, body, timeout_s, request_id)
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
