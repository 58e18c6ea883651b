"""The hub reads requests as FastAPI does by the documents of the API: same answers, records, arguments.

The requests are the examples of the OpenAPI document, with changes. FastAPI alone serves the same routes here.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from connectors.doors.http_api.routes.endpoint_routes import EndpointRoutes
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.hub import Hub
from connectors.hub.serving.admission import OPEN, AdmittedRoute
from connectors.programs.gateway_program.application import build_application
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings
from tests.connectors.doors.http_api.hub_stack import MESSAGES

TOKEN = "operators-own-token-000000000000"
BEARER = ("Authorization", f"Bearer {TOKEN}")
JSON = ("Content-Type", "application/json")
MESSAGE = b'{"recipient": "hub", "type": "a", "payload": {"n": 1.5}}'
TOPIC = "/api/hub/topics/t"

pytestmark = [pytest.mark.requirement("ST-40"), pytest.mark.long]


class Sides:
    """One application twice: as it is, and as FastAPI alone serves it. No handler is reached."""

    def __init__(self, settings: Settings) -> None:
        keyring = ensure_keyring(settings)
        self.hub = Hub(settings, keyring, TOKEN, LiveView(settings, keyring))
        self.app: FastAPI = build_application(self.hub)
        self.seen: list[Any] = []
        self.hub.refusals.record = lambda *said: self.seen.append(said)  # type: ignore[method-assign]
        # Examples of requests, by method and path. A template has its parameters in braces.
        self.requests: dict[tuple[str, str], bytes] = {}
        self.templates: dict[tuple[str, str], str] = {}
        for route in self.app.routes:
            if isinstance(route, AdmittedRoute) and route.admission != OPEN:
                self._note(route)
        self._framework = FastAPI.build_middleware_stack(self.app)
        self._loop = asyncio.new_event_loop()
        self._both = [self._client(app) for app in (self.framework, self.app)]

    async def framework(self, scope: Any, receive: Any, send: Any) -> None:
        """FastAPI alone, as an ASGI application."""
        scope["app"] = self.app
        await self._framework(scope, receive, send)

    def _note(self, route: AdmittedRoute) -> None:
        """Replace the handler of a route by a note, and take the route's example from the documents."""

        async def noted(**values: Any) -> Response:
            self.seen.append((route.path, {name: _shown(value) for name, value in values.items()}))
            return Response(b"reached", headers={"x-reached": "1"})

        noted.__signature__ = inspect.signature(route.endpoint, eval_str=True)  # type: ignore[attr-defined]
        route.endpoint = route.dependant.call = noted
        (method,) = route.methods or ()
        page = self.app.openapi()["paths"][route.path][method.lower()]
        examples = {one["name"]: str(one.get("example")) for one in page.get("parameters", ())}
        path = re.sub(r"{(\w+)}", lambda name: examples[name[1]], route.path)
        body = page.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        self.requests[method, path] = b"" if body is None else json.dumps(body).encode()
        self.templates[method, path] = route.path

    def _client(self, app: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hub")

    def _answer(self, client: httpx.AsyncClient, *request: Any, **more: Any) -> Any:
        answer = self._loop.run_until_complete(client.request(*request, **more))
        return answer.status_code, answer.headers.multi_items(), answer.content

    def answer_of(self, app: Any, *request: Any, **more: Any) -> Any:
        """Return the answer of another application."""
        return self._answer(self._client(app), *request, **more)

    def close(self) -> None:
        """Close the loop, which all requests share."""
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def ask(self, method: str, path: str, headers: Any = (BEARER, JSON), body: Any = b"") -> list[Any]:
        """Return the answer, records and calls of each side, first those of FastAPI alone."""
        found = []
        for client in self._both:
            self.seen.clear()
            content = body() if callable(body) else body
            answer = self._answer(client, method, path, headers=list(headers), content=content)
            found.append((*answer, list(self.seen)))
        return found


def _shown(value: Any) -> Any:
    return type(value) if isinstance(value, Request) else value


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """The application, not opened."""
    found = Sides(Settings(data_dir=tmp_path_factory.mktemp("sides")))
    yield found
    found.close()


def test_each_route_is_served_without_the_framework(sides):
    routes = EndpointRoutes(_never, sides.app.routes, sides.app.state.gate)
    for (method, path), body in sides.requests.items():
        answer = sides.answer_of(routes, method, path, headers=[BEARER, JSON], content=body)
        assert (answer[0], answer[2]) == (200, b"reached"), (path, answer)


async def _never(scope, receive, send):
    raise AssertionError(scope["path"])


QUERIES = ("limit=7", "wait=0.5&lease=30", "wait_reply=2", "lease=1883.0", "after=a", "limit=9&limit=8", "as=a")


def test_a_usual_request_reaches_the_handler_with_the_same_arguments(sides):
    for (method, path), body in sides.requests.items():
        for query in ("", *QUERIES):
            before, now = sides.ask(method, f"{path}?{query}", body=body)
            assert now == before, (path, query)
        for more in (("Idempotency-Key", "k-1"), ("X-Request-ID", "r-1")):
            before, now = sides.ask(method, path, (BEARER, JSON, more), body)
            assert now == before and now[0] == 200 and len(now[3]) == 1, (path, more)


HOSTILE_BODIES = {
    "empty": b"",
    "null": b"null",
    "not JSON": b"{",
    "a key twice": b'{"recipient": "a", "recipient": "b", "type": "x"}',
    "NaN": b'{"type": "x", "payload": NaN}',
    "a huge integer": b'{"type": "x", "payload": 99999999999999999999}',
    "too deep": b'{"type": "x", "payload": ' + b"[" * 80 + b"]" * 80 + b"}",
    "a lone surrogate": b'{"type": "\\ud800"}',
    "not UTF-8": b'{"type": "\xff"}',
    "an array": b"[]",
    "a text": b'"x"',
    "an unknown field": b'{"type": "x", "lease_id": "l", "message_ids": ["a"], "lease": 1, "more": 1}',
    "a wrong type": b'{"type": 5, "lease_id": 5, "message_ids": 5, "lease": "x"}',
    "a name that is none": b'{"recipient": "a/b", "type": "x", "lease_id": "a/b", "message_ids": []}',
    "a control character": b'{"type": "a\\u0000b", "lease_id": "l", "message_ids": ["a"], "reason": "\\u0000"}',
    "over the limit": b'{"type": "x", "payload": "' + b"y" * 1_100_000 + b'"}',
}


@pytest.mark.parametrize("kind", HOSTILE_BODIES)
def test_a_hostile_body_is_answered_and_recorded_as_by_the_framework(sides, kind):
    for (method, path), body in sides.requests.items():
        if body:
            before, now = sides.ask(method, path, body=HOSTILE_BODIES[kind])
            assert now == before, path
    before, now = sides.ask("POST", MESSAGES, body=HOSTILE_BODIES[kind])
    assert now[0] in (400, 413) and [one[0] for one in now[3]] in (["malformed"], ["too_large"])


HOSTILE_HEADERS = {
    "no token": (JSON,),
    "a wrong token": (("Authorization", "Bearer wrong"), JSON),
    "another scheme": (("Authorization", f"Basic {TOKEN}"), JSON),
    "two tokens, the first right": (BEARER, ("Authorization", "Bearer wrong"), JSON),
    "two tokens, the first wrong": (("Authorization", "Bearer wrong"), BEARER, JSON),
    "no content type": (BEARER,),
    "text": (BEARER, ("Content-Type", "text/plain")),
    "another JSON": (BEARER, ("Content-Type", "application/cloudevents+json")),
    "almost JSON": (BEARER, ("Content-Type", "application/json/x")),
    "JSON of another kind": (BEARER, ("Content-Type", "text/json")),
    "an empty content type": (BEARER, ("Content-Type", "")),
    "JSON with a charset": (BEARER, ("Content-Type", "Application/JSON; charset=latin-1")),
    "two content types": (BEARER, JSON, ("Content-Type", "text/plain")),
    "an empty key": (BEARER, JSON, ("Idempotency-Key", ""), ("X-Request-ID", "")),
    "a key with a space": (BEARER, JSON, ("Idempotency-Key", "a b"), ("X-Request-ID", "a b")),
    "a key that is not ASCII": (BEARER, JSON, ("Idempotency-Key", b"\xe9"), ("X-Request-ID", b"\xe9")),
    "a long key": (BEARER, JSON, ("Idempotency-Key", "k" * 256), ("X-Request-ID", "k" * 256)),
    "two keys": (BEARER, JSON, ("Idempotency-Key", "a"), ("Idempotency-Key", "b")),
}


@pytest.mark.parametrize("kind", HOSTILE_HEADERS)
def test_hostile_headers_are_answered_and_recorded_as_by_the_framework(sides, kind):
    for (method, path), body in sides.requests.items():
        before, now = sides.ask(method, path, HOSTILE_HEADERS[kind], body)
        assert now == before, path


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=x",
        "limit=",
        "more=1&more=2",
        "more=1&limit=x",
        "wait=-1",
        "wait=inf",
        "lease=1.5",
        "%ff=1",
    ],
)
def test_a_hostile_query_is_answered_and_recorded_as_by_the_framework(sides, query):
    for (method, path), body in sides.requests.items():
        before, now = sides.ask(method, f"{path}?{query}", body=body)
        assert now == before, path


@pytest.mark.parametrize("value", ["%20", "a%2fb", "-a", "x" * 300, "%00", "a%0A", "%c3%a9", "%ff"])
def test_a_hostile_value_in_a_path_is_answered_and_recorded_as_by_the_framework(sides, value):
    for (method, path), template in sides.templates.items():
        for name in re.findall(r"{\w+}", template):
            parts = zip(template.split("/"), path.split("/"), strict=True)
            hostile = "/".join(value if known == name else given for known, given in parts)
            before, now = sides.ask(method, hostile, body=sides.requests[method, path])
            assert now == before, hostile
    assert sides.ask("GET", f"/api/hub/topics/{value}")[1][0] in (400, 404)


def test_the_first_of_several_faults_is_the_one_that_is_told(sides):
    bad = (BEARER, JSON, ("Idempotency-Key", "a b"))
    for request in (("POST", "/api/hub/topics/-", bad, b"[]"), ("POST", f"{MESSAGES}?more=1", bad, b"[]")):
        before, now = sides.ask(*request)
        assert now == before and now[0] == 400
    before, now = sides.ask("POST", MESSAGES, bad, b'{"recipient": "bo", "type": 5}')
    why = "message to bo: header.Idempotency-Key: String should match pattern"
    assert now == before and now[3][0][1].startswith(why)


@pytest.mark.parametrize(
    "request_line",
    [
        ("PUT", MESSAGES),
        ("HEAD", MESSAGES),
        ("OPTIONS", MESSAGES),
        ("POST", f"{MESSAGES}/"),
        ("GET", "//"),
        ("GET", f"{TOPIC}/subscribe"),
        ("DELETE", TOPIC),
        ("POST", f"{TOPIC}/subscribe/x"),
    ],
)
def test_another_method_or_path_is_answered_as_by_the_framework(sides, request_line):
    before, now = sides.ask(*request_line, body=MESSAGE)
    assert now == before and now[0] in (404, 405)


def test_a_body_in_parts_reaches_the_handler_whole(sides):
    async def parts() -> AsyncIterator[bytes]:
        for place in range(len(MESSAGE)):
            yield MESSAGE[place : place + 1]

    before, now = sides.ask("POST", MESSAGES, body=parts)
    assert now == before and now[0] == 200


@pytest.mark.parametrize("disconnects", [True, False])
def test_a_body_that_does_not_end_is_answered_as_by_the_framework(sides, monkeypatch, disconnects):
    monkeypatch.setattr("connectors.hub.serving.strict_request.BODY_TIMEOUT_S", 0.2)
    found = []
    for app in (sides.framework, sides.app):
        sides.seen.clear()
        found.append((asyncio.run(_cut_off(app, disconnects)), list(sides.seen)))
    assert found[0] == found[1]
    assert found[1][0][0]["status"] == (400 if disconnects else 408)


async def _cut_off(app: Any, disconnects: bool) -> list[dict[str, Any]]:
    """The ASGI answer to a request whose body is never complete."""
    sent: list[dict[str, Any]] = []
    given = [{"type": "http.request", "body": MESSAGE[:10], "more_body": True}]

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        if not disconnects:
            await asyncio.sleep(30)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(name.lower().encode(), value.encode()) for name, value in (BEARER, JSON)]
    began = time.monotonic()
    request = {"type": "http", "method": "POST", "path": MESSAGES, "raw_path": MESSAGES.encode()}
    scope = {**request, "headers": headers, "query_string": b"", "root_path": "", "http_version": "1.1"}
    await app({**scope, "scheme": "http", "server": ("hub", 80), "client": ("a", 1)}, receive, send)
    assert time.monotonic() - began < 10
    return sent
