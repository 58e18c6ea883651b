"""The gateway's HTTP answers: rows as JSON, and every error as `{"reason", "message"}`; records of refusals.

Refusals (400, 401, 403, 413, 429) are recorded in the log, with a rate limit.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
import orjson
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match

from connectors.hub.live.settled_feed import SettledRecord
from connectors.plumbing.network.rates import FewRefusals
from schemas.fold.view_rows import Row
from schemas.streams.principal.principals import PrincipalRow
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import words_of
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.wire import verdicts
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import POLICY

# The gateway's own reasons, in addition to those of connectors/agent_sdk/trunkline_agent/wire/verdicts.py.
NOT_FOUND: Final = "not_found"
NO_MATCH: Final = "no_match"
UNREACHABLE: Final = "unreachable"
NOT_READY: Final = "not_ready"
BUSY: Final = "busy"
INTERNAL: Final = "internal"
METHOD_NOT_ALLOWED: Final = "method_not_allowed"
REQUEST_TIMEOUT: Final = "request_timeout"
BLOB_GONE: Final = "blob_gone"

_R = TypeVar("_R", bound=Row)

RETRY_AFTER_S: Final = 1
# Clients that find no place come back at different times within so many seconds.
_CROWDED_S: Final = 8
VERDICT_HEADER: Final = "Trunkline-Verdict"

_STATUS_BY_REASON: Final[dict[str, int]] = {
    verdicts.TOO_LARGE: 413,
    verdicts.MALFORMED: 400,
    verdicts.SCHEMA_VERSION: 400,
    verdicts.UNKNOWN_STREAM: 404,
    verdicts.UNKNOWN_RECIPIENT: 404,
    verdicts.BAD_SIGNATURE: 403,
    verdicts.SECRET_IN_EVENT: 400,
    verdicts.UNAUTHORIZED: 401,
    verdicts.POLICY: 403,
    verdicts.SEQ_CONFLICT: 409,
    verdicts.TOO_LATE: 409,
    verdicts.AFTER_TERMINAL: 409,
    verdicts.ILLEGAL_TRANSITION: 409,
    verdicts.MAILBOX_FULL: 429,
    verdicts.FOLD_FAILED: 500,
}
_REASON_BY_STATUS: Final = {400: verdicts.MALFORMED, 404: NOT_FOUND, 405: METHOD_NOT_ALLOWED}


class ApiError(HTTPException):
    """An HTTP error for a client, with a status, a reason (a stable code) and a message for people.

    A handler raises it; `add_error_handlers` makes the response. The base class is HTTPException, because
    FastAPI passes no other error on from the parsing of a body.
    """

    def __init__(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.reason = reason


Failure = StarletteHTTPException | RequestValidationError | TrunklineError
"""An error of a handler that `error_answer` makes a response to."""


def not_found(message: str) -> ApiError:
    """Return an ApiError with status 404. The caller raises it when a thing does not exist."""
    return ApiError(404, NOT_FOUND, message)


def existing(row: _R | None, message: str) -> _R:
    """Return `row` unchanged. If `row` is None, raise ApiError (404) with `message`."""
    if row is None:
        raise not_found(message)
    return row


def malformed(message: str) -> ApiError:
    """Return an ApiError with status 400. The caller raises it when a request is invalid."""
    return ApiError(400, verdicts.MALFORMED, message)


def unavailable(message: str, reason: str = UNREACHABLE) -> ApiError:
    """Return an ApiError with status 503 and the header `Retry-After`.

    The caller raises it when the request cannot be answered now, but can succeed later.
    """
    return ApiError(503, reason, message, {"Retry-After": str(RETRY_AFTER_S)})


def crowded(message: str) -> ApiError:
    """Return an ApiError with status 503 and a random `Retry-After`: all places for such requests are taken."""
    wait_s = random.randint(1, _CROWDED_S)  # noqa: S311  no secret depends on it
    return ApiError(503, BUSY, message, {"Retry-After": str(wait_s)})


def too_many(message: str, wait_s: float = RETRY_AFTER_S, reason: str = BUSY) -> ApiError:
    """Return an ApiError with status 429. The caller raises it when a client exceeds a rate or queue limit.

    `wait_s` becomes the header `Retry-After`, in whole seconds and at least 1. `reason` is the code of the
    refusal.
    """
    return ApiError(429, reason, message, {"Retry-After": str(max(1, round(wait_s)))})


def check_task_text(text: str, most: int) -> None:
    """Raise ApiError (400) if the text of a task has more than `most` characters.

    `most` is the setting `limits.task_characters`.
    """
    if len(text) > most:
        raise malformed(f"the task has {len(text)} characters, and limits.task_characters allows {most}")


def refuse_rejected(settled: SettledRecord) -> SettledRecord:
    """Return a settled record unchanged, or raise ApiError with the fold's reason if it was rejected.

    A handler calls this function after it has appended a record. The HTTP status follows from the reason. A
    duplicate is no error.
    """
    if settled.verdict != verdicts.REJECTED:
        return settled
    status, reason, message = _error_of(settled)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        raise too_many(message, reason=reason)
    raise ApiError(status, reason, message)


def rejection_response(settled: SettledRecord) -> Response:
    """Return the HTTP response for a record that the fold rejected, as `refuse_rejected` makes it.

    A handler returns it for a record that holds the request's own bytes. Raising would append a second record,
    about the refused request. The header `Trunkline-Verdict` is `rejected`.
    """
    return error_response(*_error_of(settled), {VERDICT_HEADER: verdicts.REJECTED})


def _error_of(settled: SettledRecord) -> tuple[int, str, str]:
    """Return status, reason and message for a rejected record."""
    reason = settled.reason or INTERNAL
    return _STATUS_BY_REASON.get(reason, 500), reason, settled.why or reason.replace("_", " ")


_PLACE: Final = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


def first_fault(error: RequestValidationError) -> str:
    """Return the first fault of an invalid request as `place: fault`, such as `query.limit: ...`.

    `error` is FastAPI's error. The value that the client sent is left out, because it may be secret.
    """
    first = error.errors()[0]
    # The last part of an unknown key's place is the key itself, which is input.
    place = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]
    # A key that the client chose may be long or have control characters, which no record of a refusal may have.
    parts = [str(part) if _PLACE.fullmatch(str(part)) else "?" for part in place]
    return f"{'.'.join(parts)}: {words_of(first)}"


def error_response(status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return the HTTP response for an error, with the JSON body `{"reason", "message"}`.

    `reason` is a stable code, and `message` is for people. `headers` are added to the response.
    """
    return JSONResponse({"reason": reason, "message": message}, status, headers)


def http_error_response(status: int, headers: dict[str, str] | None) -> Response:
    """Return the HTTP response to an error that the framework raised, such as an unknown path.

    The body is `{"reason", "message"}`; both follow from the status. `headers` are added to the response.
    """
    try:
        message = HTTPStatus(status).phrase.lower()
    except ValueError:
        message = "error"
    reason = _REASON_BY_STATUS.get(status, re.sub(r"\W+", "_", message))
    return error_response(status, reason, message, headers)


def json_answer(document: Any, status: int = 200, verdict: str | None = None) -> Response:
    """Return an HTTP response with a JSON body.

    Args:
        document: The body.
        status: The HTTP status.
        verdict: The verdict on the record that the request appended. The header `Trunkline-Verdict` carries it,
            so that the client can tell a repeated request from the first one. None for no header.
    """
    headers = {} if verdict is None else {VERDICT_HEADER: verdict}
    return Response(orjson.dumps(document), status, headers, "application/json")


def encoded_within(documents: Iterable[Any], most: int) -> list[orjson.Fragment]:
    """Return documents as encoded JSON, the first and those after it that have together `most` bytes at most.

    Each document is made and encoded after the one before, so that no two of them are in memory decoded.
    """
    found: list[orjson.Fragment] = []
    for document in documents:
        encoded = orjson.dumps(document)
        most -= len(encoded)
        if found and most < 0:
            break
        found.append(orjson.Fragment(encoded))
    return found


def row_as_json(row: Row) -> dict[str, Any]:
    """Return the columns of a view row as JSON, with times in ISO 8601.

    The hash of a principal's token is left out.
    """
    found = {name: _shown(name, value) for name, value in msgspec.structs.asdict(row).items()}
    if isinstance(row, PrincipalRow):
        del found["token_sha256"]
    return found


def row_as_answer(model: type[BaseModel], row: Row, **columns: str) -> dict[str, Any]:
    """Return a row of a view as JSON with the fields of an answer model.

    Args:
        model: The answer model. Each field takes the value of the column with its name.
        row: The row. AttributeError is raised if it lacks a column.
        columns: For a field with another name than its column: `field="column"`.
    """
    names = {field: columns.get(field, field) for field in model.model_fields}
    return {field: _shown(column, getattr(row, column)) for field, column in names.items()}


def _shown(column: str, value: Any) -> Any:
    return iso_moment(value) if column.endswith("_at") and isinstance(value, int) else value


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    """Return all methods of a path. Each method has a route of its own."""
    routes = [route for route in app.router.routes if isinstance(route, APIRoute)]
    exact = [route for route in routes if route.path == request.url.path]
    fitting = exact or [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in fitting for method in route.methods or ()})


def add_error_handlers(app: FastAPI) -> None:
    """Make an application answer every error that a handler raises with `{"reason", "message"}`.

    An ApiError has its own status. Invalid requests get status 400, BackboneUnreachable 503, and other
    TrunklineErrors 500.
    """

    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(TrunklineError)
    async def failed(request: Request, error: Failure) -> Response:
        if type(error) is StarletteHTTPException and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            return http_error_response(error.status_code, {"Allow": ", ".join(_methods_of(app, request))})
        return error_answer(error)


def error_answer(error: Failure) -> Response:
    """Return the HTTP response to an error that a handler raised.

    An ApiError has its own status, reason and headers. An invalid request gets status 400, BackboneUnreachable
    503, and other TrunklineErrors 500. The response to an error of the framework follows from its status.
    """
    if isinstance(error, RequestValidationError):
        error = malformed(first_fault(error))
    if isinstance(error, BackboneUnreachable):
        error = unavailable(str(error))
    if isinstance(error, TrunklineError):
        return error_response(500, INTERNAL, str(error))
    headers: Any = error.headers
    if isinstance(error, ApiError):
        return error_response(error.status_code, error.reason, str(error.detail), headers)
    return http_error_response(error.status_code, headers)


DOOR: Final = "http"


class RefusalRecorder(FewRefusals):
    """A rate-limited recorder of refused requests. For the arguments see `FewRefusals`. Not thread-safe."""

    def __init__(
        self,
        append: Callable[[OutgoingRecord], object],
        clock: Callable[[], float] = time.monotonic,
        *,
        door: str = DOOR,
    ) -> None:
        super().__init__(append, clock, door=door)

    def forbidden(self, why: str, principal: str, route: str) -> ApiError:
        """Record a refusal with the reason `policy`, and return an ApiError (403) for the caller to raise.

        The arguments are those of `record`.
        """
        self.record(POLICY, why, principal, route)
        return ApiError(403, POLICY, why)
