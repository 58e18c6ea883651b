"""The door's one gate: every route names its action, and nobody comes past here without a right to it.

`AdmittedRoute` asks before a handler sees the request, also before its body is parsed. A route that names no
action cannot be made; the few that need no token say so with `open_to_all`.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from connectors.gateway.web.answers import INTERNAL, ApiError, error_response, first_fault
from connectors.gateway.web.bounded_http import note_principal
from connectors.gateway.web.identities import Identities, Unidentified
from connectors.gateway.web.policy import Action, Caller, decide, needs_owner
from connectors.gateway.web.refusals import RefusalRecorder
from connectors.gateway.web.strict_request import NotRead, StrictRequest
from schemas.errors import TrunklineError
from schemas.fold.view_rows import TokenRow
from schemas.wire.verdicts import MALFORMED, POLICY, TOO_LARGE, UNAUTHORIZED

log = structlog.stdlib.get_logger(__name__)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
OwnerOf = Callable[[Request], Awaitable[str | None]]
"""Says whose the thing is that a request is about; None when it belongs to nobody known. The request has its
caller in `state.caller`, who is not admitted yet."""

WhyRefused = Callable[[Any, str], str]
"""`why_refused(body, reason)`: the reason to record, with as much of the decoded body as may be shown."""

_OPEN: Final = "open"
_BEARER: Final = "HTTPBearer"
_REALM: Final = 'Bearer realm="trunkline"'


async def no_owner(request: Request) -> str | None:
    """For what belongs to nobody: only roles that may do it to everything may do it."""
    return None


def _reason_alone(body: Any, why: str) -> str:
    return why


def asks_for(
    action: Action, owner_of: OwnerOf = no_owner, why_refused: WhyRefused = _reason_alone
) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint with the action that its caller must have a right to. `why_refused` words the recorded
    reason for a body that does not fit.
    """

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__trunkline_admission__ = (action, owner_of, why_refused)  # type: ignore[attr-defined]
        return endpoint

    return mark


def open_to_all(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that needs no token."""
    endpoint.__trunkline_admission__ = _OPEN  # type: ignore[attr-defined]
    return endpoint


def documented(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI page, with what a bearer token is."""
    page = FastAPI.openapi(app)
    bearer = {"type": "http", "scheme": "bearer", "description": "A principal's token."}
    page.setdefault("components", {})["securitySchemes"] = {_BEARER: bearer}
    return page


class Gate:
    """Knows the callers and records whom it refuses. `on_expired` is told of the token of a task that was used
    after its time.
    """

    def __init__(
        self,
        identities: Identities,
        refusals: RefusalRecorder,
        body_limit_bytes: int,
        on_expired: Callable[[TokenRow], None],
    ) -> None:
        self._identities = identities
        self._refusals = refusals
        self._on_expired = on_expired
        self.body_limit_bytes = body_limit_bytes

    async def admit(self, request: Request, route: str, action: Action, owner_of: OwnerOf) -> Caller:
        """The caller, who may do `action`. Raises ApiError: 401 without a valid token, 403 without a right."""
        caller = self._identities.identify(request.headers.get("authorization"))
        if isinstance(caller, Unidentified):
            self._refusals.record(UNAUTHORIZED, caller.why, caller.principal, route)
            if caller.expired is not None:
                self._on_expired(caller.expired)
            raise ApiError(401, UNAUTHORIZED, caller.why, {"WWW-Authenticate": _REALM})
        request.state.caller = caller
        note_principal(request.scope, caller.principal)
        try:
            owner = await owner_of(request) if needs_owner(caller, action) else None
        except ApiError as error:
            self.note_fault(error, caller, route)
            raise
        decision = decide(caller, action, owner)
        if not decision.allowed:
            self._refusals.record(POLICY, decision.why, caller.principal, route)
            raise ApiError(403, POLICY, decision.why)
        return caller

    def note_fault(
        self, error: Exception, caller: Caller, route: str, why_refused: WhyRefused = _reason_alone
    ) -> None:
        """Record what a known caller sent that is malformed or too large. Of the body the record has no more
        than `why_refused` repeats.
        """
        if isinstance(error, RequestValidationError):
            why = why_refused(error.body, first_fault(error))
            self._refusals.record(MALFORMED, why, caller.principal, route)
        elif isinstance(error, ApiError) and not isinstance(error, NotRead):
            if error.reason == MALFORMED:
                self._refusals.record(MALFORMED, str(error.detail), caller.principal, route)
            elif error.reason == TOO_LARGE:
                self._refusals.record(TOO_LARGE, str(error.detail), caller.principal, route)

    def still_holds(self, request: Request) -> bool:
        """Whether the token of a long answer's request is still that of the same caller."""
        found = self._identities.identify(request.headers.get("authorization"))
        return bool(found == request.state.caller)


class AdmittedRoute(APIRoute):
    """A route whose handler runs only for those whom the gate admits. Raises TypeError when it is made
    without an action.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not hasattr(endpoint, "__trunkline_admission__"):
            raise TypeError(f"route {path}: its endpoint says neither asks_for(...) nor open_to_all")
        self.admission = endpoint.__trunkline_admission__
        if self.admission != _OPEN:
            # Not as a dependency: the gate reads the token itself, and nobody needs it read twice.
            options["openapi_extra"] = {
                "x-trunkline-action": str(self.admission[0]),
                "security": [{_BEARER: []}],
            }
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with the gate before it, and with an answer for what nobody expected."""
        handle = super().get_route_handler()
        admission, path = self.admission, self.path

        async def admitted(request: Request) -> Response:
            gate: Gate = request.app.state.gate
            strict = StrictRequest(request.scope, request.receive, gate.body_limit_bytes)
            strict.scope["trunkline_route"] = path
            if admission == _OPEN:
                return await _answered(handle, strict, path)
            (action, owner_of, why_refused), route = admission, f"{request.method} {path}"
            caller = await gate.admit(strict, route, action, owner_of)
            strict.scope["trunkline_principal"] = caller.principal
            try:
                return await _answered(handle, strict, path)
            except (ApiError, RequestValidationError) as error:
                gate.note_fault(error, caller, route, why_refused)
                raise

        return admitted


async def _answered(
    handle: Callable[[Request], Coroutine[Any, Any, Response]], request: Request, path: str
) -> Response:
    try:
        return await handle(request)
    except (ApiError, TrunklineError):
        raise
    except Exception as error:
        if type(error).__module__.startswith(("fastapi.", "starlette.")):
            raise
        # Not the error's text: it may quote what nobody should read.
        where = "".join(traceback.format_tb(error.__traceback__)[-4:])
        log.error("handler_failed", error=type(error).__name__, route=path, where=where)
        return error_response(500, INTERNAL, "the gateway failed; its log says where")
