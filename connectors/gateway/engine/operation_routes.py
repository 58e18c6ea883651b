"""Routes of the framework that serve operations with care: refusals, waits, and requests of unusual forms."""

from __future__ import annotations

from functools import partial
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import Query, Request, Response

from connectors.gateway.engine.operation import Answer, Asked, Behind, Operation, Unusual
from connectors.gateway.web.admission import Gate, Routes
from connectors.gateway.web.answers import json_answer
from connectors.gateway.web.idempotency import caller_of


def add_operation(routes: Routes, gate: Gate, operation: Operation) -> None:
    """Add the route of an operation. During a wait, `gate` checks the client's token."""

    async def serve(request: Request, body: Any = None, wanted: Any = None, key: str | None = None) -> Response:
        # Whether the client is there, only a wait can tell here.
        asked = Asked(caller_of(request), body, wanted, key, lambda: False)
        try:
            answer = await _answer(operation, asked)
        except Unusual:
            return await operation.slowly(asked, partial(gate.is_gone, request))
        return json_answer(answer.document, verdict=answer.verdict)

    of_request = {
        "request": Request,
        "body": operation.BODY,
        "wanted": None if operation.QUERY is None else Annotated[operation.QUERY, Query()],
    }
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind)
        for name, kind in of_request.items()
        if kind is not None
    ]
    parameters.append(Parameter("key", Parameter.KEYWORD_ONLY, default=None, annotation=operation.KEY))
    # The framework makes the documents of the API from these.
    serve.__name__, serve.__doc__ = operation.NAME, operation.__doc__
    serve.__signature__ = Signature(parameters, return_annotation=Response)  # type: ignore[attr-defined]
    add = getattr(routes, operation.METHOD.lower())
    more = {"why_refused": operation.why_refused, "responses": operation.RESPONSES}
    add(operation.PATH, operation.ACTION, operation.ANSWER, **more)(serve)


async def _answer(operation: Operation, asked: Asked) -> Answer:
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
    return operation.answer(asked, settled)
