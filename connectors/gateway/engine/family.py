"""Operations that are declared as functions, by families such as those of schedules (decision 0055).

A function gets the hub, the request, and the values that its signature names: parameters of the path by their
names, the query as `wanted`, and the body as `body`. Its form says what the operation does:

- A usual function reads. It returns the document, or a `LongAnswer`.
- A usual function that returns the body of a record changes something. The record is settled, and the answer is
  the thing that it is about.
- A generator yields records, each after the one before was accepted, and gets them settled. It returns the
  document. What is before the first `yield` is the operation's `plan`, and the rest is its `answer`.
- A coroutine function waits. Only the careful path serves it.

A document comes with the verdict on the last record, unless it is an `Answer`. What raises ApiError is refused.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, get_args

from pydantic import BaseModel

from connectors.gateway.engine.operation import (
    SMALL_BYTES,
    Answer,
    Asked,
    CarefulOperation,
    Operation,
    Unusual,
    reserve_bytes,
)
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import encoded_within, refuse_rejected, row_as_json
from connectors.gateway.web.idempotency import IdempotencyKey
from connectors.gateway.web.policy import Action
from connectors.live.settled_feed import SettledRecord
from schemas.fold.view_rows import Row
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import WireBody

Owner = Callable[[Hub, Asked], str | None]
"""Returns the owner of the thing that a request is about; see `Operation.owner`."""
Steps = Generator[OutgoingRecord, SettledRecord, Any]
"""The steps of a change: it yields records, gets them settled, and returns the document."""
_ROW_BYTES: Final = 1024
_Function = Callable[..., Any]
_R = TypeVar("_R")


def _undeclared(*_: Any) -> Any:
    raise NotImplementedError


class LongAnswer(NamedTuple):
    """A document that may be long. Unless it is small, it is made in a thread, when there is room for it.

    Attributes:
        size: The largest number of its bytes. It never has more than `limits.answer_bytes`.
        document: Makes it. Thread-safe.
    """

    size: int
    document: Callable[[], Any]


class Family:
    """The operations on things of one kind.

    Args:
        path: The begin of their paths.
        record: Makes the record of a body. Its further arguments are those of `Asked.origin`.
        shown: Returns the thing of a record's body, by its name, as its operations show it.
        named: The field of such a body with the name.
    """

    def __init__(
        self,
        path: str,
        record: Callable[..., OutgoingRecord] = _undeclared,
        shown: Callable[[Hub, str], Any] = _undeclared,
        named: str = "name",
    ) -> None:
        self.path, self.record, self.shown, self.named = path, record, shown, named
        self._declared: list[type[Operation]] = []

    def operations(self, hub: Hub) -> list[Operation]:
        """Return the operations, in the order of their declarations."""
        return [one(hub) for one in self._declared]

    def get(self, path: str, action: Action, answer: Any, **options: Any) -> Callable[[_Function], _Function]:
        """Return a decorator that declares an operation which reads. For the arguments see `declare`."""
        return self.declare("GET", path, action, answer, key=None, **options)

    def post(self, path: str, action: Action, answer: Any, **options: Any) -> Callable[[_Function], _Function]:
        """Return a decorator that declares an operation which changes. For the arguments see `declare`."""
        return self.declare("POST", path, action, answer, **options)

    def declare(
        self,
        method: str,
        path: str,
        action: Action,
        answer: type[BaseModel],
        *,
        owner: Owner | None = None,
        key: Any = IdempotencyKey,
        status: int = 200,
        **options: Any,
    ) -> Callable[[_Function], _Function]:
        """Return a decorator that declares an operation, and returns its function unchanged.

        Args:
            method: The HTTP method.
            path: The path after that of the family.
            action: The action that the caller needs a right to.
            answer: The model of the answer.
            owner: Returns the owner of the thing that a request is about.
            key: The header with the idempotency key, as the type of a route's parameter. None: there is none.
            status: The HTTP status of the answer.
            options: Further attributes of the operation.
        """

        def declared(function: _Function) -> _Function:
            first, *others = inspect.signature(function, eval_str=True).parameters.values()
            kinds = {one.name: one for one in others[1:]}
            body, query = kinds.pop("body", None), kinds.pop("wanted", None)
            needs_body = body is not None and body.default is inspect.Parameter.empty
            fields: dict[str, Any] = {
                "NAME": function.__name__,
                "METHOD": method,
                "PATH": self.path + path,
                "PARAMETERS": {name: one.annotation for name, one in kinds.items()},
                "ACTION": action,
                "ANSWER": answer,
                "QUERY": None if query is None else query.annotation,
                "NEEDS_BODY": needs_body,
                "KEY": key,
                "STATUS": status,
                "FAMILY": self,
                "FUNCTION": staticmethod(function),
                "__doc__": function.__doc__,
                **options,
            }
            if body is not None:
                fields["BODY"] = body.annotation if needs_body else get_args(body.annotation)[0]
            if owner is not None:
                fields["OWNER"] = staticmethod(owner)
            base = _Waiting if inspect.iscoroutinefunction(function) else _Planned
            self._declared.append(type(function.__name__, (base,), fields))
            return function

        return declared


class _Declared(Operation):
    """An operation that is declared by its function."""

    FAMILY: ClassVar[Family]
    FUNCTION: ClassVar[_Function]
    OWNER: ClassVar[Owner | None] = None

    def owner(self, asked: Asked) -> str | None:
        """Return the owner of the thing that a request is about."""
        return None if self.OWNER is None else self.OWNER(self.hub, asked)

    def called(self, asked: Asked) -> Any:
        """Return what the function returns for a request."""
        values = dict(asked.path)
        if self.BODY is not None:
            values["body"] = asked.body
        if self.QUERY is not None:
            values["wanted"] = asked.query
        return self.FUNCTION(self.hub, asked, **values)


class _Waiting(_Declared, CarefulOperation):
    """An operation whose function waits."""

    async def later(self, asked: Asked) -> Answer:
        """Return what the function returns."""
        return _answer(await self.called(asked), None)


class _Planned(_Declared):
    """An operation whose function waits for nothing but the log."""

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the first record of the function. A long answer is unusual."""
        found = self.called(asked)
        if isinstance(found, LongAnswer):
            asked.known = found
            if found.size > SMALL_BYTES:
                raise Unusual
            found = found.document()
        elif isinstance(found, WireBody):
            found = self._change(asked, found)
        asked.known = found
        return (next(found),) if isinstance(found, Generator) else ()

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Any:
        """Return the document of the function, after a wait if it has further records."""
        if not settled:
            return _answer(asked.known, None)
        record, answer = self._next(asked, settled[0])
        return answer if record is None else self._further(asked, record)

    async def later(self, asked: Asked) -> Answer:
        """Return a long answer."""
        size = min(asked.known.size, self.hub.settings.limits.answer_bytes)
        await reserve_bytes(self.hub, asked.caller.principal, size)
        return Answer(await asyncio.to_thread(asked.known.document))

    async def _further(self, asked: Asked, record: OutgoingRecord | None) -> Answer | None:
        answer = None
        while record is not None:
            record, answer = self._next(asked, await self.hub.appender.settle(record))
        return answer

    def _next(self, asked: Asked, settled: SettledRecord) -> tuple[OutgoingRecord | None, Answer | None]:
        """Return the next record of the function, or else the answer. Raises ApiError for a rejected record."""
        verdict = refuse_rejected(settled).verdict
        try:
            return asked.known.send(settled), None
        except StopIteration as end:
            return None, _answer(end.value, verdict)

    def _change(self, asked: Asked, body: WireBody) -> Steps:
        family = self.FAMILY
        yield family.record(body, **asked.origin)
        return family.shown(self.hub, getattr(body, family.named))


def _answer(document: Any, verdict: str | None) -> Answer:
    return document if isinstance(document, Answer) else Answer(document, verdict)


def page_by_name(
    hub: Hub,
    title: str,
    rows: Iterable[_R],
    name_of: Callable[[_R], str],
    after: str | None,
    shown: Callable[[_R], Any] = row_as_json,
    row_bytes: int = _ROW_BYTES,
    limit: int | None = None,
    **more: Any,
) -> LongAnswer:
    """Return the rows of a list that fit into one answer, sorted by name, and the number of the others (`left`).

    Args:
        hub: The hub.
        title: The field with the rows.
        rows: All rows.
        name_of: Returns the name of a row.
        after: The rows up to this name are left out. None: none are.
        shown: Returns the JSON of a row.
        row_bytes: The bytes of a row, roughly.
        limit: The number of rows that are wanted, None for all.
        more: Further fields of the document.
    """
    wanted = sorted((row for row in rows if after is None or name_of(row) > after), key=name_of)[:limit]

    def document() -> dict[str, Any]:
        found = encoded_within(map(shown, wanted), hub.settings.limits.answer_bytes)
        return {title: found, "left": len(wanted) - len(found), **more}

    return LongAnswer(len(wanted) * row_bytes, document)
