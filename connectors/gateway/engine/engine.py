"""The engine of the hub's operations: admission, turns, the log, and answers, without a coroutine.

The rules are those of the careful path, which gets everything unusual. `test_direct_http.py` holds both equal.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from connectors.gateway.engine.operation import Asked, Exchange, Operation, Unusual
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import Gate, answered
from connectors.gateway.web.answers import VERDICT_HEADER, ApiError, error_answer
from connectors.gateway.web.identities import Unidentified
from connectors.gateway.web.policy import Action, Caller, decide, needs_owner
from connectors.live.settled_feed import SettledRecord
from schemas.streams.principal.principals import OPERATOR
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

_VERSION: Final = b" HTTP/1.1"
_JSON: Final = (b"application/json", b"application/json; charset=utf-8")
_KEY: Final = re.compile(rb"[!-~]{1,255}").fullmatch
_HEAD: Final = b"content-length: %d\r\ncontent-type: application/json\r\n"
_VERDICT: Final = VERDICT_HEADER.lower().encode() + b": %b\r\n"
# The validated queries that are kept.
_QUERIES: Final = 256
# So many callers' rights are remembered.
_RIGHTS: Final = 10_000


class Engine:
    """Answers usual requests for its operations. Not thread-safe: for the event loop.

    Args:
        hub: The hub.
        gate: The check of tokens and rights.
        operations: The operations.
    """

    def __init__(self, hub: Hub, gate: Gate, operations: Iterable[Operation]) -> None:
        self._hub = hub
        self._gate = gate
        self._operations = {one.route.encode(): one for one in operations}
        self._may: dict[tuple[Caller, Action], bool] = {}
        self._refusals: set[asyncio.Task[None]] = set()

    def find(self, request_line: bytes) -> tuple[Operation | None, bytes]:
        """Return the operation that a request line asks for, None for no usual one, and its query."""
        if not request_line.endswith(_VERSION):
            return None, b""
        target, _, query = request_line[: -len(_VERSION)].partition(b"?")
        return self._operations.get(target), query

    def admit(self, exchange: Exchange) -> bool:
        """Find the caller of a request and check its right. Return False if the careful path must do that."""
        authorization = exchange.headers.get(b"authorization")
        if authorization is None:
            return False
        caller = self._hub.identities.identify(authorization.decode("ascii"))
        if isinstance(caller, Unidentified) or not self._is_allowed(caller, exchange.operation.ACTION):
            return False
        exchange.caller = caller
        return exchange.connection.admits(caller.principal, is_operator=caller.role == OPERATOR)

    def begin(self, exchange: Exchange) -> None:
        """Begin an admitted request when it is its principal's turn."""
        self._hub.turns.begin(exchange.caller.principal, partial(self._plan, exchange))

    def _is_allowed(self, caller: Caller, action: Action) -> bool:
        found = self._may.get((caller, action))
        if found is None:
            if len(self._may) >= _RIGHTS:
                self._may.clear()
            is_free = not needs_owner(caller, action)
            found = self._may[caller, action] = is_free and decide(caller, action).allowed
        return found

    def _plan(self, exchange: Exchange) -> None:
        operation = exchange.operation
        try:
            exchange.asked = self._asked(exchange)
            records = operation.plan(exchange.asked)
        except Unusual:
            self._pass_on(exchange)
        except Exception as error:  # noqa: BLE001  told to the client, as by the careful path
            self._refuse(exchange, error)
        else:
            append = partial(self._append, exchange, records)
            if operation.IS_BOUNDED:
                self._hub.under_way.begin(exchange.caller.principal, append)
            else:
                append()

    def _asked(self, exchange: Exchange) -> Asked:
        """Return what a request asks for. Raises Unusual if any value is not valid."""
        operation, headers, body, query = exchange.operation, exchange.headers, None, None
        if operation.BODY is not None:
            if headers.get(b"content-type") not in _JSON or len(exchange.body) > self._gate.body_limit_bytes:
                raise Unusual
            try:
                body = operation.BODY.model_validate(decode(exchange.body)[0])
            except (MalformedJsonError, ValidationError):
                raise Unusual from None
        elif exchange.body:
            raise Unusual
        if operation.QUERY is not None:
            query = _query(operation.QUERY, exchange.query)
        elif exchange.query:
            raise Unusual
        key = headers.get(operation.key_header.lower().encode())
        if key is not None and not _KEY(key):
            raise Unusual
        said = None if key is None else key.decode("ascii")
        return Asked(exchange.caller, body, query, said, exchange.connection.is_heard)

    def _append(self, exchange: Exchange, records: Sequence[OutgoingRecord]) -> None:
        exchange.settled = [None] * len(records)
        exchange.left = len(records)
        for place, record in enumerate(records):
            self._hub.appender.settle_then(record, partial(self._settled, exchange, place))
        if not records:
            self._end(exchange)

    def _settled(self, exchange: Exchange, place: int, settled: SettledRecord | Exception) -> None:
        exchange.settled[place] = settled
        exchange.left -= 1
        if not exchange.left:
            self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        operation, asked, settled = exchange.operation, exchange.asked, exchange.settled
        if operation.IS_BOUNDED:
            self._hub.under_way.end(exchange.caller.principal)
        operation.ended(asked)
        try:
            for one in settled:
                if isinstance(one, Exception):
                    raise one
            answer = operation.answer(asked, settled)
            body = orjson.dumps(answer.document)
        except Unusual:
            self._pass_on(exchange)
        except Exception as error:  # noqa: BLE001  told to the client, as by the careful path
            self._refuse(exchange, error)
        else:
            head = _HEAD % len(body)
            if answer.verdict is not None:
                head = _VERDICT % answer.verdict.encode() + head
            exchange.connection.answer(200, head, body)
            self._note(exchange, 200, "answered")

    def _pass_on(self, exchange: Exchange) -> None:
        self._hub.metrics.direct("passed_on")
        exchange.connection.pass_on(exchange)

    def _refuse(self, exchange: Exchange, error: Exception) -> None:
        task = asyncio.get_running_loop().create_task(self._refused(exchange, error))
        self._refusals.add(task)
        task.add_done_callback(self._refusals.discard)

    async def _refused(self, exchange: Exchange, error: Exception) -> None:
        """Answer with an error as the careful path does, after the pause for a limit that was exceeded."""
        operation, caller = exchange.operation, exchange.caller

        async def fail(_: Any) -> Any:
            raise error

        try:
            response = await answered(fail, None, operation.PATH)  # type: ignore[arg-type]
        except (HTTPException, TrunklineError) as known:
            if isinstance(known, ApiError):
                self._gate.note_fault(known, caller, operation.route, operation.why_refused)
                await self._gate.hold(known, caller)
            response = error_answer(known)
        head = b"".join([b"%b: %b\r\n" % one for one in response.raw_headers])
        exchange.connection.answer(response.status_code, head, bytes(response.body))
        self._note(exchange, response.status_code, "refused")

    def _note(self, exchange: Exchange, status: int, result: str) -> None:
        self._hub.metrics.direct(result)
        operation, seconds = exchange.operation, time.monotonic() - exchange.began
        self._hub.metrics.answered(operation.METHOD, operation.PATH, status, seconds)
        self._hub.request_lines.add(
            operation.METHOD, operation.PATH, status, seconds, exchange.caller.principal
        )


@lru_cache(_QUERIES)
def _query(model: type[BaseModel], query: bytes) -> BaseModel:
    pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True)
    if len(named := dict(pairs)) < len(pairs):
        raise Unusual
    try:
        return model.model_validate(named)
    except ValidationError:
        raise Unusual from None
