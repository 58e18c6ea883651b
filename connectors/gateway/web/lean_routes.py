"""Serves usual requests of the routes without the steps of the framework, which take most of a request's time.

A route is declared once, by `Routes`. Here its endpoint is called directly, with the parameters that FastAPI
found in its declaration, and FastAPI's fields validate their values. A request that is unusual in any way goes
to FastAPI instead, before its endpoint is called: one with an invalid or repeated parameter, or with another
content type. So FastAPI words the refusals of that kind, and this module has no rules of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qsl

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from connectors.gateway.web.admission import ADMITTED, OPEN, AdmittedRoute, Gate, answered
from connectors.gateway.web.answers import ApiError, error_answer
from connectors.gateway.web.strict_request import StrictRequest
from trunkline_agent.errors import TrunklineError

_JSON: Final = ("application/json", "application/json; charset=utf-8")
# The validated queries that a route keeps, and the longest of them in bytes.
_QUERIES: Final = 64
_QUERY_BYTES: Final = 128
_Values = dict[str, Any]


class _Unusual(Exception):
    """FastAPI must serve this request."""


class LeanRoutes:
    """ASGI middleware that serves requests of the routes with a fixed path, and passes all others on.

    Args:
        app: The framework's application, which serves all other requests.
        routes: The application's routes.
        gate: The check of tokens and rights.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], gate: Gate) -> None:
        self._app = app
        self._gate = gate
        self._routes: dict[tuple[str, str], _LeanRoute] = {}
        known = list(routes)
        for route in known:
            if isinstance(route, AdmittedRoute) and _is_lean(route):
                for method in route.methods or ():
                    if _first_match(known, method, route.path) is route:
                        self._routes[method, route.path] = _LeanRoute(route, method)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by its endpoint, or pass it on to the framework's application."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        request = StrictRequest(scope, receive, self._gate.body_limit_bytes)
        try:
            answer = await route.answer(request, self._gate)
        except _Unusual:
            await self._app(scope, request.rest(), send)
        else:
            await answer(scope, receive, send)


class _LeanRoute:
    """One route, whose endpoint is called without the framework."""

    def __init__(self, route: AdmittedRoute, method: str) -> None:
        self._route = route
        self._dependant: Any = route.dependant
        self._name = f"{method} {route.path}"
        self._action, self._owner_of, self._why_refused = route.admission
        self._query = lru_cache(_QUERIES)(self._validated_query)
        headers = {b"authorization", b"content-type"}
        headers |= {field.alias.lower().encode() for field in _header_fields(self._dependant)}
        self._headers = frozenset(headers)

    async def answer(self, request: StrictRequest, gate: Gate) -> Response:
        """Return the response to a request. Raises _Unusual for a request that FastAPI must serve."""
        headers, scope = self._headers_of(request.scope), request.scope
        scope["trunkline_route"] = self._route.path
        try:
            caller = scope[ADMITTED] = await gate.admit(request, self._name, self._action, self._owner_of)
        except (ApiError, TrunklineError) as error:
            return error_answer(error)
        scope["trunkline_principal"] = caller.principal
        try:
            values = await self._values(request, headers)
            return await answered(lambda _: self._dependant.call(**values), request, self._route.path)
        except (HTTPException, TrunklineError) as error:
            if isinstance(error, ApiError):
                gate.note_fault(error, caller, self._name, self._why_refused)
                await gate.hold(error, caller)
            return error_answer(error)

    def _headers_of(self, scope: Scope) -> dict[str, str]:
        """Return the headers that the route reads, by their names in lower case. Raises _Unusual."""
        found: dict[str, str] = {}
        for name, value in scope["headers"]:
            if name in self._headers:
                text = name.decode("latin-1")
                if text in found:
                    raise _Unusual
                found[text] = value.decode("latin-1")
        return found

    async def _values(self, request: StrictRequest, headers: Mapping[str, str]) -> _Values:
        """Return the arguments of the endpoint. Raises _Unusual for invalid ones, and ApiError as `json`."""
        body = self._dependant.body_params
        if body and headers.get("content-type") not in _JSON:
            raise _Unusual
        document = await request.json() if body and await request.body() else None
        if body and document is None:
            raise _Unusual
        values = await _values_of(self._dependant, request, headers)
        if self._dependant.query_params:
            query = request.scope["query_string"]
            found = self._query if len(query) <= _QUERY_BYTES else self._validated_query
            values[self._dependant.query_params[0].name] = found(query)
        if body:
            values[body[0].name] = _validated(body[0], document)
        return values

    def _validated_query(self, query: bytes) -> Any:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        if len(named := dict(pairs)) < len(pairs):
            raise _Unusual
        return _validated(self._dependant.query_params[0], named)


async def _values_of(dependant: Any, request: Request, headers: Mapping[str, str]) -> _Values:
    """Return the arguments of an endpoint, or of one that it depends on, except query and body."""
    values: _Values = {}
    for below in dependant.dependencies:
        values[below.name] = await below.call(**await _values_of(below, request, headers))
    for field in dependant.header_params:
        given = headers.get(field.alias.lower())
        values[field.name] = field.field_info.default if given is None else _validated(field, given)
    if dependant.request_param_name:
        values[dependant.request_param_name] = request
    return values


def _validated(field: Any, value: Any) -> Any:
    found, errors = field.validate(value, {}, loc=())
    if errors:
        raise _Unusual
    return found


def _header_fields(dependant: Any) -> list[Any]:
    below = [field for one in dependant.dependencies for field in _header_fields(one)]
    return [*dependant.header_params, *below]


def _first_match(routes: Iterable[BaseRoute], method: str, path: str) -> BaseRoute | None:
    """Return the route that the framework chooses for a path."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    return next((one for one in routes if one.matches(scope)[0] is Match.FULL), None)


def _is_lean(route: AdmittedRoute) -> bool:
    """Return whether the endpoint has only parameters that `_LeanRoute` can fill, and returns a response."""
    dependant: Any = route.dependant
    query, body = dependant.query_params, dependant.body_params
    return (
        route.admission != OPEN
        and inspect.signature(route.endpoint, eval_str=True).return_annotation is Response
        and len(query) <= 1
        and all(hasattr(field.field_info.annotation, "model_fields") for field in query)
        and len(body) <= 1
        and not route._embed_body_fields
        and _is_simple(dependant)
        and all(_is_simple(one, "query_params", "body_params") for one in dependant.dependencies)
    )


def _is_simple(dependant: Any, *none_of: str) -> bool:
    """Return whether a coroutine function has only parameters that can be filled, and none of `none_of`."""
    others = ("path_params", "cookie_params", "websocket_param_name", "http_connection_param_name")
    more = ("response_param_name", "background_tasks_param_name", "security_scopes_param_name")
    return (
        inspect.iscoroutinefunction(dependant.call)
        and not any(getattr(dependant, name) for name in (*others, *more, *none_of))
        and not any(field.field_info.is_required() for field in dependant.header_params)
    )
