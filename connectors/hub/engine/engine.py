"""The engine of the hub's operations: admission, turns, the log, and answers, most without a coroutine.

The rules are those of the careful path, which gets everything unusual. `tests/matrix` holds both equal.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from connectors.hub.engine.direct_http import Exchange
from connectors.hub.engine.operation import Answer, Asked, Behind, Operation, Planned, Unusual, Waiting
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import Gate, answered, token_ended
from connectors.hub.serving.answers import VERDICT_HEADER, ApiError, error_answer, unavailable
from connectors.hub.serving.identities import Unidentified
from connectors.hub.serving.policy import Action, Caller, decide, needs_owner
from schemas.streams.principal.principals import OPERATOR
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

_VERSION: Final = b" HTTP/1.1"
# Of a path. One with other characters is unusual.
_SEGMENT: Final = rb"([A-Za-z0-9._~-]+)"
_PARAMETER: Final = re.compile(rb"{\w+}")
_JSON: Final = (b"application/json", b"application/json; charset=utf-8")
_KEY: Final = re.compile(rb"[!-~]{1,255}").fullmatch
_HEAD: Final = b"content-length: %d\r\ncontent-type: application/json\r\n"
# In metrics and request lines, for a client that has left during its wait.
_CLIENT_LEFT: Final = 499
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
        direct = [one for one in operations if one.IS_DIRECT]
        self._operations = {one.route.encode(): one for one in direct}
        self._named = {one.NAME: one for one in direct if one.parameters}
        # Each path with parameters is a group, with the name of its operation, of its family's pattern.
        families: dict[bytes, list[bytes]] = {}
        for one in self._named.values():
            families.setdefault(_family(one.route.encode()), []).append(_pattern_of(one))
        self._match = {name: re.compile(b"|".join(found)).fullmatch for name, found in families.items()}
        self._may: dict[tuple[Caller, Action], bool] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, request_line: bytes) -> tuple[Operation | None, Sequence[bytes], bytes]:
        """Return the operation of a request line, the values of the path's parameters, and the query.

        The operation is None for a request line that the careful path must read.
        """
        if not request_line.endswith(_VERSION):
            return None, (), b""
        target, _, query = request_line[: -len(_VERSION)].partition(b"?")
        operation = self._operations.get(target)
        if operation is None and (match := self._match.get(_family(target), _nothing)(target)) is not None:
            operation, first = self._named[str(match.lastgroup)], match.lastindex or 0
            return operation, match.groups()[first : first + len(operation.parameters)], query
        return operation, (), query

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
        """Begin an admitted request now, or in one of the next steps of the event loop.

        Each principal begins one request in each step (`FairTurns`). The exchange gets the answer.
        """
        self._hub.turns.begin(exchange.caller.principal, partial(self._plan, exchange))

    def _is_allowed(self, caller: Caller, action: Action) -> bool:
        """Return whether a caller may do an action, at least with its own things."""
        found = self._may.get((caller, action))
        if found is None:
            if len(self._may) >= _RIGHTS:
                self._may.clear()
            found = self._may[caller, action] = needs_owner(caller, action) or decide(caller, action).allowed
        return found

    def _plan(self, exchange: Exchange) -> None:
        operation, caller = exchange.operation, exchange.caller
        try:
            asked = exchange.asked = self._asked(exchange)
            action = operation.ACTION
            if needs_owner(caller, action) and not decide(caller, action, operation.owner(asked)).allowed:
                raise Unusual
        except Unusual:
            self._pass_on(exchange)
        except Exception as error:  # noqa: BLE001  told to the client, as by the careful path
            self._refuse(exchange, error)
        else:
            self._carry_out(exchange)

    def _carry_out(self, exchange: Exchange) -> None:
        operation, asked = exchange.operation, exchange.asked
        try:
            records = operation.plan(asked)
        except Waiting as nothing:
            self._wait(exchange, nothing)
        except Behind:
            self._start(self._catch_up(exchange))
        except Unusual:
            self._pass_on(exchange)
        except Exception as error:  # noqa: BLE001  told to the client, as by the careful path
            self._refuse(exchange, error)
        else:
            settle_then(operation, asked, records, partial(self._end, exchange))

    def _wait(self, exchange: Exchange, nothing: Waiting) -> None:
        """Plan again when a message is settled, or when the time is over."""
        if exchange.wait is None:
            exchange.wait = self._hub.mailbox_waits.begin(
                nothing.mailboxes,
                is_taker=True,
                request=nothing.request,
                on_wake=partial(self._resume, exchange),
            )
        exchange.wait.clear()
        exchange.is_probed = nothing.is_probed
        exchange.timer = asyncio.get_running_loop().call_later(nothing.left_s, self._resume, exchange)

    def _resume(self, exchange: Exchange) -> None:
        """Go on after a wait, if the client is still there and may have what it waits for."""
        if exchange.timer is None:  # it does not wait now
            return
        exchange.timer.cancel()
        exchange.timer = None
        exchange.asked.is_fresh = False
        if self._hub.identities.identify(exchange.headers[b"authorization"].decode("ascii")) != exchange.caller:
            self._refuse(exchange, token_ended())
        elif self._hub.stopping.is_set():
            self._refuse(exchange, unavailable("the gateway stops; ask another one"))
        elif exchange.is_probed and not exchange.connection.is_heard():
            self._start(self._probe(exchange))
        else:
            exchange.asked.is_gone = exchange.connection.has_left()
            self._carry_out(exchange)

    def leave(self, exchange: Exchange) -> None:
        """End a request that waits for messages, because its connection has ended. Another one goes on."""
        if exchange.timer is not None:
            exchange.timer.cancel()
            exchange.timer = None
            self._end_wait(exchange)
            self._note(exchange, _CLIENT_LEFT, "left")

    async def _probe(self, exchange: Exchange) -> None:
        is_there = await exchange.connection.answers()
        exchange.asked.is_gone, exchange.asked.is_heard = not is_there, lambda: is_there
        self._carry_out(exchange)

    async def _catch_up(self, exchange: Exchange) -> None:
        try:
            self._hub.appender.check()
            await self._hub.fresh.catch_up()
        except Exception as error:  # noqa: BLE001  told to the client, as by the careful path
            await self._refused(exchange, error)
        else:
            exchange.asked.is_fresh = True
            exchange.asked.is_gone = exchange.connection.has_left()
            self._carry_out(exchange)

    def _end_wait(self, exchange: Exchange) -> None:
        if exchange.wait is not None:
            self._hub.mailbox_waits.end(exchange.wait)
            exchange.wait = None

    def _asked(self, exchange: Exchange) -> Asked:
        """Return what a request asks for. Raises Unusual if any value is not valid."""
        operation, query = exchange.operation, None
        try:
            path = {
                name: kind.validate_python(value.decode("ascii"))
                for (name, kind), value in zip(operation.parameters.items(), exchange.path, strict=True)
            }
            body = self._body(exchange)
        except (MalformedJsonError, ValidationError):
            raise Unusual from None
        if operation.QUERY is not None:
            query = _query(operation.QUERY, exchange.query)
        elif exchange.query:
            raise Unusual
        key = exchange.headers.get(operation.key_header)
        if key is not None and not _KEY(key):
            raise Unusual
        said = None if key is None else key.decode("ascii")
        return Asked(exchange.caller, body, query, said, exchange.connection.is_heard, path)

    def _body(self, exchange: Exchange) -> BaseModel | None:
        operation: Operation = exchange.operation
        if not exchange.body and not (operation.BODY is not None and operation.NEEDS_BODY):
            return None
        is_json = exchange.headers.get(b"content-type") in _JSON
        if operation.BODY is None or not is_json or len(exchange.body) > self._gate.body_limit_bytes:
            raise Unusual
        return operation.BODY.model_validate(decode(exchange.body)[0])

    def _end(self, exchange: Exchange) -> None:
        try:
            answer = outcome(exchange.operation, exchange.asked)
            if not isinstance(answer, Answer):
                self._start(self._await(exchange, answer))
                return
            body = orjson.dumps(answer.document)
        except Behind:
            self._start(self._catch_up(exchange))
        except Unusual:
            self._pass_on(exchange)
        except Exception as error:  # noqa: BLE001  told to the client, as by the careful path
            self._refuse(exchange, error)
        else:
            self._answer(exchange, body, answer.verdict)

    async def _await(self, exchange: Exchange, answer: Awaitable[Answer]) -> None:
        try:
            document, verdict = await answer
            body = orjson.dumps(document)
        except Exception as error:  # noqa: BLE001  told to the client, as by the careful path
            await self._refused(exchange, error)
        else:
            self._answer(exchange, body, verdict)

    def _answer(self, exchange: Exchange, body: bytes, verdict: str | None) -> None:
        self._end_wait(exchange)
        head = _HEAD % len(body)
        if verdict is not None:
            head = _VERDICT % verdict.encode() + head
        status = exchange.operation.STATUS
        exchange.connection.answer(status, head, body)
        self._note(exchange, status, "answered")

    def _pass_on(self, exchange: Exchange) -> None:
        self._end_wait(exchange)
        self._hub.metrics.direct("passed_on")
        exchange.connection.pass_on(exchange)

    def _refuse(self, exchange: Exchange, error: Exception) -> None:
        self._start(self._refused(exchange, error))

    def _start(self, rest: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(rest)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        self._end_wait(exchange)
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


def _family(target: bytes) -> bytes:
    """Return the third part of a path, such as `topics` of `/api/hub/topics/a`, or any other word."""
    return target.split(b"/", 4)[-2:][0]


def _nothing(_: bytes) -> None:
    return None


def _pattern_of(operation: Operation) -> bytes:
    fixed = map(re.escape, _PARAMETER.split(operation.route.encode()))
    return b"(?P<%b>%b)" % (operation.NAME.encode(), _SEGMENT.join(fixed))


def settle_then(
    operation: Planned, asked: Asked, records: Sequence[OutgoingRecord], end: Callable[[], None]
) -> None:
    """Append the records of a request, and call `end` when none is under way. Then call `outcome`."""
    append = partial(_append, operation, asked, records, end)
    if operation.IS_BOUNDED:
        operation.hub.under_way.begin(asked.caller.principal, append)
    else:
        append()


def outcome(operation: Planned, asked: Asked) -> Answer | Awaitable[Answer]:
    """Return the answer to a request whose records are settled. Raises as `answer` and the appender do."""
    if operation.IS_BOUNDED:
        operation.hub.under_way.end(asked.caller.principal)
    operation.ended(asked)
    for one in asked.settled:
        if isinstance(one, Exception):
            raise one
    return operation.answer(asked, asked.settled)


def _append(
    operation: Planned, asked: Asked, records: Sequence[OutgoingRecord], end: Callable[[], None]
) -> None:
    asked.settled, asked.left = [None] * len(records), len(records)
    for place, record in enumerate(records):
        operation.hub.appender.settle_then(record, partial(_settled, asked, place, end))
    if not records:
        end()


def _settled(asked: Asked, place: int, end: Callable[[], None], settled: SettledRecord | Exception) -> None:
    asked.settled[place] = settled
    asked.left -= 1
    if not asked.left:
        end()


@lru_cache(_QUERIES)
def _query(model: type[BaseModel], query: bytes) -> BaseModel:
    pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True)
    if len(named := dict(pairs)) < len(pairs):
        raise Unusual
    try:
        return model.model_validate(named)
    except ValidationError:
        raise Unusual from None
