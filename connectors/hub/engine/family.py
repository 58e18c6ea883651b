"""Operations that are declared as functions, by families such as those of schedules, and their routes.

A function (decision 0055) gets the hub, the request, and the values that its signature names: parameters of the
path by their names, the query as `wanted`, and the body as `body`. Its form says what the operation does:

- A usual function reads. It returns the document, or a `LongAnswer`.
- A usual function that returns the body of a record changes something. The record is settled, and the answer is
  the thing that it is about.
- A generator yields records, each after the one before was accepted, and gets them settled. It returns the
  document. The part before the first `yield` is the operation's `plan`, and the rest is its `answer`.
- A coroutine function waits. Only the careful path serves it.

A document comes with the verdict on the last record, unless it is an `Answer`. An ApiError refuses the request.

The framework's routes serve operations with care: refusals, waits, and requests of unusual forms.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from inspect import Parameter, Signature
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeVar, get_args

from fastapi import Query, Request, Response

from connectors.hub.engine.operation import (
    SMALL_BYTES,
    Answer,
    Asked,
    Behind,
    IsGone,
    Operation,
    Planned,
    Unusual,
    reserve_bytes,
)
from connectors.hub.live.row_lists import OrderedRows
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import Gate, Routes
from connectors.hub.serving.answers import encoded_within, json_answer, refuse_rejected, row_as_json
from connectors.hub.serving.identities import caller_of
from connectors.hub.serving.policy import Action
from schemas.wire.record import JSON_CONTENT, OutgoingRecord
from schemas.wire.wire_body import WireBody

Owner = Callable[[Hub, Asked], str | None]
"""Returns the owner of the thing that a request is about; see `Operation.owner`."""
Steps = Generator[OutgoingRecord, SettledRecord, Any]
"""The steps of a change: it yields records, gets them settled, and returns the document."""
ROW_BYTES: Final = 1024
"""The bytes of a usual row as JSON, roughly."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_R = TypeVar("_R")


class LongAnswer(NamedTuple):
    """A document that may be long. Unless it is small, it is made in a thread, when there is room for it.

    Attributes:
        size: The largest number of its bytes.
        document: Makes it. Thread-safe.
    """

    size: int
    document: Callable[[], Any]


class Family:
    """The operations on things of one kind. The decorators `get`, `post` and `delete` declare one.

    The arguments of a decorator are the path after that of the family, the action that the caller needs a right
    to, and the model of the answer. Optional are `owner`, if it is not that of the family, and attributes of
    the operation, such as `STATUS` and the names that clients have for it (`TOOL`, `COMMAND` and `CALL`).

    Attributes:
        operations: The classes of the operations, in the order of their declarations.

    Args:
        path: The begin of the paths.
        shown: Returns the thing that a record's body is about, by its name, as the operations show it.
        named: The field of such a body with the name.
        owner: Returns the owner of the thing in a request's path.
    """

    def __init__(self, path: str, shown: Any = None, named: str = "name", owner: Owner | None = None) -> None:
        self.path, self.shown, self.named, self.owner = path, shown, named, owner
        self.operations: list[type[Operation]] = []
        self.get = partial(self._declare, "GET", KEY=None)
        self.post = partial(self._declare, "POST")
        self.delete = partial(self._declare, "DELETE")

    def _declare(
        self, method: str, path: str, action: Action, answer: Any, owner: Owner | None = None, **options: Any
    ) -> Callable[[_Function], _Function]:
        def declared(function: _Function) -> _Function:
            kinds = dict(list(inspect.signature(function, eval_str=True).parameters.items())[2:])
            body, query = kinds.pop("body", None), kinds.pop("wanted", None)
            needs_body = body is not None and body.default is inspect.Parameter.empty
            fields = {
                "NAME": function.__name__,
                "METHOD": method,
                "PATH": self.path + path,
                "PARAMETERS": {name: one.annotation for name, one in kinds.items()},
                "ACTION": action,
                "ANSWER": answer,
                "BODY": body and (body.annotation if needs_body else get_args(body.annotation)[0]),
                "NEEDS_BODY": needs_body,
                "QUERY": query and query.annotation,
                "OWNER": staticmethod(owner or (self.owner if kinds else None) or _nobody),
                "FAMILY": self,
                "FUNCTION": staticmethod(function),
                "IS_DIRECT": not inspect.iscoroutinefunction(function),
                "__doc__": function.__doc__,
            }
            self.operations.append(type(function.__name__, (_Declared,), {**fields, **options}))
            return function

        return declared


def _nobody(hub: Hub, asked: Asked) -> None:
    return None


class _Declared(Operation):
    """An operation that is declared by its function."""

    FAMILY: ClassVar[Family]
    FUNCTION: ClassVar[Any]
    OWNER: ClassVar[Any]

    def owner(self, asked: Asked) -> str | None:
        """Return the owner of the thing that a request is about."""
        found: str | None = self.OWNER(self.hub, asked)
        return found

    def called(self, asked: Asked) -> Any:
        """Return what the function returns for a request."""
        values = {name: asked.path[name] for name in self.PARAMETERS}
        if self.BODY is not None:
            values["body"] = asked.body
        if self.QUERY is not None:
            values["wanted"] = asked.query
        return self.FUNCTION(self.hub, asked, **values)

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the first record of the function. A long answer, or one that needs a wait, is unusual."""
        if not self.IS_DIRECT:
            raise Unusual
        asked.known = found = self.called(asked)
        if isinstance(found, LongAnswer):
            if found.size > SMALL_BYTES:
                raise Unusual
            asked.known = found.document()
        elif isinstance(found, WireBody):
            asked.known = self._change(asked, found)
        return (next(asked.known),) if isinstance(asked.known, Generator) else ()

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Any:
        """Return the document of the function, after a wait if it has further records."""
        if not settled:
            return _answer(asked.known)
        found = self._next(asked, settled[0])
        return found if isinstance(found, Answer) else self._further(asked, found)

    async def later(self, asked: Asked) -> Answer:
        """Return the document of a function that waits, or a long one when there is room for it."""
        found = asked.known if self.IS_DIRECT else await self.called(asked)
        if not isinstance(found, LongAnswer):
            return _answer(found)
        await reserve_bytes(self.hub, asked.principal, found.size)
        return Answer(await asyncio.to_thread(found.document))

    async def _further(self, asked: Asked, found: OutgoingRecord | Answer) -> Answer:
        while not isinstance(found, Answer):
            found = self._next(asked, await self.hub.appender.settle(found))
        return found

    def _next(self, asked: Asked, settled: SettledRecord) -> OutgoingRecord | Answer:
        """Return the next record of the function, or else the answer. Raises ApiError for a rejected record."""
        verdict = refuse_rejected(settled).verdict
        try:
            record: OutgoingRecord = asked.known.send(settled)
        except StopIteration as end:
            return _answer(end.value, verdict)
        return record

    def _change(self, asked: Asked, body: WireBody) -> Steps:
        yield body.record(**asked.origin)
        return self.FAMILY.shown(self.hub, getattr(body, self.FAMILY.named))


def _answer(document: Any, verdict: str | None = None) -> Answer:
    return document if isinstance(document, Answer) else Answer(document, verdict)


def page_by_name(
    hub: Hub,
    title: str,
    rows: Iterable[_R],
    name_of: Callable[[_R], str],
    wanted: Any,
    shown: Callable[[_R], Any] | None = None,
    row_bytes: int = ROW_BYTES,
    **more: Any,
) -> LongAnswer:
    """Return the rows of a list that fit into one answer, sorted by name, and how many do not (`left`).

    Args:
        hub: The hub.
        title: The field with the rows.
        rows: All rows.
        name_of: Returns the name of a row.
        wanted: The query. The rows up to the name `after`, and those beyond the number `limit`, are left out.
        shown: Returns the JSON of a row. None: all its columns.
        row_bytes: The bytes of a row, roughly.
        more: Further fields of the document.
    """
    further = (row for row in rows if wanted.after is None or name_of(row) > wanted.after)
    found = sorted(further, key=name_of)[: getattr(wanted, "limit", None)]
    return _page(hub, title, lambda: found, shown, len(found) * row_bytes, more)


def page_by_age(
    hub: Hub,
    title: str,
    rows: OrderedRows[Any],
    lists: Sequence[str],
    limit: int,
    shown: Callable[[Any], Any] | None = None,
    row_bytes: int = ROW_BYTES,
    *,
    is_bounded: bool = True,
    **span: Any,
) -> LongAnswer:
    """Return the newest rows of lists that fit, the number of all (`total`), and of older ones (`left`).

    Args:
        hub: The hub.
        title: The field with the rows.
        rows: All rows.
        lists: The lists of `rows`.
        limit: The number of rows that are wanted. Only these count as `left`.
        shown: Returns the JSON of a row. None: all its columns.
        row_bytes: The bytes of a row, roughly.
        is_bounded: Whether the answer has `limits.answer_bytes` at most, and the field `left`.
        span: Their ages, as of `OrderedRows.newest`.
    """
    total, newest = rows.count(lists, **span), partial(rows.newest, lists, limit, **span)
    return _page(hub, title, newest, shown, min(limit, total) * row_bytes, {"total": total}, is_bounded)


def _page(
    hub: Hub, title: str, rows: Any, shown: Any, size: int, more: dict[str, Any], is_bounded: bool = True
) -> LongAnswer:
    most = hub.settings.limits.answer_bytes

    def document() -> dict[str, Any]:
        wanted = rows()
        found = encoded_within(map(shown or row_as_json, wanted), most if is_bounded else sys.maxsize)
        return {title: found, **({"left": len(wanted) - len(found)} if is_bounded else {}), **more}

    return LongAnswer(min(most, size), document)


def add_operation(routes: Routes, gate: Gate, operation: Operation) -> None:
    """Add the route of an operation. During a wait, `gate` checks the client's token."""

    async def serve(
        request: Request, body: Any = None, wanted: Any = None, key: str | None = None, **path: Any
    ) -> Response:
        # Whether the client is there, only a wait can tell here.
        asked = Asked(caller_of(request), body, wanted, key, lambda: False, path)
        return await serve_carefully(operation, asked, partial(gate.is_gone, request))

    # The framework makes the documents of the API from these.
    serve.__name__, serve.__doc__ = operation.NAME, operation.__doc__
    serve.__signature__ = Signature(_parameters(operation), return_annotation=Response)  # type: ignore[attr-defined]
    add = getattr(routes, operation.METHOD.lower())
    more: dict[str, Any] = {"why_refused": operation.why_refused, "responses": operation.RESPONSES}
    if operation.STATUS != HTTPStatus.OK:
        more["status_code"] = operation.STATUS
    if operation.EXAMPLE is not None:
        example = {JSON_CONTENT: {"example": operation.EXAMPLE}}
        more["openapi_extra"] = {"requestBody": {"content": example}}
    add(operation.PATH, operation.ACTION, operation.ANSWER, operation.owner_of, **more)(serve)


def _parameters(operation: Operation) -> list[Parameter]:
    needed = {"request": Request, **operation.PARAMETERS}
    optional = {}
    if operation.BODY is not None and operation.NEEDS_BODY:
        needed["body"] = operation.BODY
    elif operation.BODY is not None:
        optional["body"] = operation.BODY | None
    if operation.QUERY is not None:
        needed["wanted"] = Annotated[operation.QUERY, Query()]
    if operation.KEY is not None:
        optional["key"] = operation.KEY
    only = Parameter.KEYWORD_ONLY
    found = [Parameter(name, only, annotation=kind) for name, kind in needed.items()]
    return found + [Parameter(name, only, default=None, annotation=kind) for name, kind in optional.items()]


async def serve_carefully(operation: Operation, asked: Asked, is_gone: IsGone) -> Response:
    """Return the answer to a validated request of a caller with the right to it. For `is_gone` see `slowly`.

    Raises ApiError for a refusal, and BackboneUnreachable.
    """
    try:
        answer = await carried_out(operation, asked)
    except Unusual:
        return await operation.slowly(asked, is_gone)
    return json_answer(answer.document, operation.STATUS, answer.verdict)


async def carried_out(operation: Planned, asked: Asked) -> Answer:
    """Return the answer to a request, whose records are appended and settled. For coroutines."""
    hub = operation.hub
    try:
        records = operation.plan(asked)
    except Behind:
        hub.appender.check()
        await hub.fresh.catch_up()
        asked.is_fresh = True
        records = operation.plan(asked)
    try:
        if operation.IS_BOUNDED:
            async with hub.under_way.one(asked.caller.principal):
                settled = await hub.appender.settle_all(records)
        else:
            settled = await hub.appender.settle_all(records)
    finally:
        operation.ended(asked)
    answer = operation.answer(asked, settled)
    return answer if isinstance(answer, Answer) else await answer
