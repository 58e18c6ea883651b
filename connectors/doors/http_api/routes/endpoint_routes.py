"""Serves the hub's routes by the signatures of their endpoints, from which FastAPI makes the documents.

A value has the type of its parameter, and comes from the place that the parameter's annotation names. A fault
has the words that FastAPI has for it. FastAPI's own steps would take most of a request's time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable
from email.message import Message
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.params import Param
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from connectors.hub.serving.admission import OPEN, AdmittedRoute, Gate
from connectors.hub.serving.answers import error_answer
from connectors.hub.serving.strict_request import StrictRequest
from trunkline_agent.errors import TrunklineError

# FastAPI reports the faults of these places in this order.
_PLACES: Final = ("path", "query", "header", "body")
_NOTHING: Final = object()
# So many queries, and content types, are remembered.
_KEPT: Final = 256


class EndpointRoutes:
    """ASGI middleware that serves the routes which need a token, and passes all other requests on.

    Args:
        app: The framework's application, which serves the others.
        routes: The routes of the application.
        gate: The check of tokens and rights.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], gate: Gate) -> None:
        self._app = app
        self._gate = gate
        self._fixed: dict[tuple[str, str], _EndpointRoute] = {}
        self._others: list[_EndpointRoute] = []
        for route in routes:
            if isinstance(route, AdmittedRoute) and route.admission != OPEN:
                found = _EndpointRoute(route)
                if route.param_convertors:
                    self._others.append(found)
                else:
                    self._fixed[found.method, route.path] = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by its endpoint, or pass it on."""
        route = self._route_of(scope) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        request = StrictRequest(scope, receive, self._gate.body_limit_bytes)
        try:
            answer = await self._gate.serve(request, route.path, route.admission, route.answer)
        except (RequestValidationError, HTTPException, TrunklineError) as error:
            answer = error_answer(error)
        await answer(scope, receive, send)

    def _route_of(self, scope: Scope) -> _EndpointRoute | None:
        """Return the route of a request, with the values of the path's parameters in the scope."""
        method, path = scope["method"], scope["path"]
        found = self._fixed.get((method, path))
        if found is None:
            for route in self._others:
                if method == route.method and (match := route.match(path)):
                    scope["path_params"] = match.groupdict()
                    return route
        return found


class _EndpointRoute:
    """One route, which has one method."""

    def __init__(self, route: AdmittedRoute) -> None:
        (self.method,) = tuple(route.methods or ())
        self.path, self.admission = route.path, route.admission
        self.match = route.path_regex.match
        self._endpoint = _Called(route.endpoint)

    async def answer(self, request: Request) -> Response:
        """Return the answer to an admitted request. Raises RequestValidationError for an invalid one."""
        body = await _body_of(request) if self._endpoint.has_body else _NOTHING
        answer: Response = await self._endpoint.call(request, body)
        return answer


class _Field(NamedTuple):
    """A parameter of a function.

    Attributes:
        place: The place of its value, as FastAPI reports a fault there.
    """

    name: str
    place: tuple[str, ...]
    kind: TypeAdapter[Any]
    default: Any

    def value(self, request: Request, body: Any) -> Any:
        """Return the validated value. Raises RequestValidationError."""
        given = body
        match self.place:
            case ("path", name):
                given = request.path_params[name]
            case ("header", name):
                given = request.headers.get(name, _NOTHING)
        if given is _NOTHING and self.default is not inspect.Parameter.empty:
            return self.default
        try:
            if self.place == ("query",):
                return _query(self.kind, request.scope["query_string"])
            if given is not _NOTHING:
                return self.kind.validate_python(given, from_attributes=True)
            first: Any = {"type": "missing", "loc": (), "msg": "Field required"}
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        raise RequestValidationError([{**first, "loc": (*self.place, *first["loc"])}], body=body)


class _Called:
    """An endpoint, which is called with values of a request."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function
        self._fields: list[_Field] = []
        self._requests: list[str] = []
        for name, one in inspect.signature(function, eval_str=True).parameters.items():
            mark = next(iter(getattr(one.annotation, "__metadata__", ())), None)
            if one.annotation is Request:
                self._requests.append(name)
            else:
                self._fields.append(_field(name, one, mark))
        self._fields.sort(key=lambda field: _PLACES.index(field.place[0]))
        self.has_body = bool(self._fields) and self._fields[-1].place == ("body",)

    async def call(self, request: Request, body: Any) -> Any:
        """Return the result of the function. Raises RequestValidationError for the first fault."""
        values = {field.name: field.value(request, body) for field in self._fields}
        return await self._function(**values, **dict.fromkeys(self._requests, request))


def _field(name: str, parameter: inspect.Parameter, mark: Any) -> _Field:
    place: tuple[str, ...] = ("body",)
    if isinstance(mark, Param):
        # A query is one model.
        place = (mark.in_.value,) if mark.in_.value == "query" else (mark.in_.value, mark.alias or name)
    return _Field(name, place, TypeAdapter(parameter.annotation), parameter.default)


@lru_cache(_KEPT)
def _query(kind: TypeAdapter[Any], query: bytes) -> Any:
    """Return a query as its model, which does not change. Raises ValidationError."""
    return kind.validate_python(dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)))


async def _body_of(request: Request) -> Any:
    """Return the decoded body, or its bytes if its content type is not JSON, or `_NOTHING`."""
    content = await request.body()
    if not content:
        return _NOTHING
    return await request.json() if _is_json(request.headers.get("content-type", "")) else content


@lru_cache(_KEPT)
def _is_json(content_type: str) -> bool:
    kind = Message()
    kind["content-type"] = content_type
    subtype = kind.get_content_subtype()
    return kind.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
