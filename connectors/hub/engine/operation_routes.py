"""Routes of the framework that serve operations with care: refusals, waits, and requests of unusual forms."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import Query, Request, Response

from connectors.hub.engine.operation import Answer, Asked, Behind, IsGone, Operation, Planned, Unusual
from connectors.hub.serving.admission import Gate, Routes
from connectors.hub.serving.answers import json_answer
from connectors.hub.serving.identities import caller_of
from schemas.wire.record import JSON_CONTENT


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
