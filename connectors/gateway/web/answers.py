"""What the gateway answers: rows as JSON, and errors, which are `{"reason", "message"}` whatever happened."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec
import orjson
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from connectors.live.settled_feed import SettledRecord
from schemas.fold.view_rows import PrincipalRow, Row
from schemas.wire.verdicts import (
    AFTER_TERMINAL,
    FOLD_FAILED,
    ILLEGAL_TRANSITION,
    MALFORMED,
    POLICY,
    REJECTED,
    SCHEMA_VERSION,
    SEQ_CONFLICT,
    TOO_LARGE,
    TOO_LATE,
    UNAUTHORIZED,
    UNKNOWN_RECIPIENT,
    UNKNOWN_STREAM,
)
from schemas.wire.wire_body import words_of

# Reasons of the door itself, beside those of schemas/wire/verdicts.py.
NOT_FOUND: Final = "not_found"
NO_MATCH: Final = "no_match"
UNREACHABLE: Final = "unreachable"
NOT_READY: Final = "not_ready"
BUSY: Final = "busy"
INTERNAL: Final = "internal"
METHOD_NOT_ALLOWED: Final = "method_not_allowed"
REQUEST_TIMEOUT: Final = "request_timeout"

RETRY_AFTER_S: Final = 1
VERDICT_HEADER: Final = "Trunkline-Verdict"

_STATUS_BY_REASON: Final[dict[str, int]] = {
    TOO_LARGE: 413,
    MALFORMED: 400,
    SCHEMA_VERSION: 400,
    UNKNOWN_STREAM: 404,
    UNKNOWN_RECIPIENT: 404,
    UNAUTHORIZED: 401,
    POLICY: 403,
    SEQ_CONFLICT: 409,
    TOO_LATE: 409,
    AFTER_TERMINAL: 409,
    ILLEGAL_TRANSITION: 409,
    FOLD_FAILED: 500,
}
_REASON_BY_STATUS: Final = {400: MALFORMED, 404: NOT_FOUND, 405: METHOD_NOT_ALLOWED}
_EPOCH_US: Final = 1_000_000


class ApiError(HTTPException):
    """An answer that is an error. An HTTPException, because FastAPI lets only those out of a body's parsing."""

    def __init__(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.reason = reason


def not_found(message: str) -> ApiError:
    """404: there is no such thing."""
    return ApiError(404, NOT_FOUND, message)


def malformed(message: str) -> ApiError:
    """400: the request cannot be read."""
    return ApiError(400, MALFORMED, message)


def check_task_text(text: str, most: int) -> None:
    """Raise ApiError (400) for the text of a task with more than `most` characters."""
    if len(text) > most:
        raise malformed(f"the task has {len(text)} characters, and limits.task_characters allows {most}")


def unavailable(message: str, reason: str = UNREACHABLE) -> ApiError:
    """503 with Retry-After: not now."""
    return ApiError(503, reason, message, {"Retry-After": str(RETRY_AFTER_S)})


def refuse_rejected(settled: SettledRecord) -> SettledRecord:
    """`settled` itself. Raises ApiError with the fold's own reason when it was rejected."""
    if settled.verdict != REJECTED:
        return settled
    reason = settled.reason or INTERNAL
    raise ApiError(_STATUS_BY_REASON.get(reason, 500), reason, settled.why or reason.replace("_", " "))


def first_fault(error: RequestValidationError) -> str:
    """The first thing that is wrong with a request, `place: what`, without the input, which may be secret."""
    first = error.errors()[0]
    # The last part of an unknown key's place is the key, and that is input.
    place = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]
    return f"{'.'.join(str(part) for part in place)}: {words_of(first)}"


def error_response(status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as it goes over the wire."""
    return JSONResponse({"reason": reason, "message": message}, status, headers)


def http_error_response(status: int, headers: dict[str, str] | None) -> Response:
    """What the framework refuses by itself (no such route, wrong method), in our form."""
    try:
        message = HTTPStatus(status).phrase.lower()
    except ValueError:
        message = "error"
    reason = _REASON_BY_STATUS.get(status, re.sub(r"\W+", "_", message))
    return error_response(status, reason, message, headers)


def json_answer(document: Any, status: int = 200, verdict: str | None = None) -> Response:
    """An answer. `verdict`: that on the record that was appended for it; it stands in a header, so that a
    repeated request is told from the first.
    """
    headers = {} if verdict is None else {VERDICT_HEADER: verdict}
    return Response(orjson.dumps(document), status, headers, "application/json")


def iso_moment(moment_us: int) -> str:
    """Microseconds since 1970 UTC as ISO 8601 with Z."""
    seconds, micros = divmod(moment_us, _EPOCH_US)
    found = datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)
    return found.isoformat(timespec="milliseconds" if micros % 1000 == 0 else "microseconds")[:-6] + "Z"


def row_as_json(row: Row) -> dict[str, Any]:
    """A row's fields, moments as ISO 8601 with Z. A principal's token hash stays out."""
    found = {
        name: iso_moment(value) if name.endswith("_at") and isinstance(value, int) else value
        for name, value in msgspec.structs.asdict(row).items()
    }
    if isinstance(row, PrincipalRow):
        del found["token_sha256"]
    return found
