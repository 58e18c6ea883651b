"""Authentication and authorization of every HTTP route.

Each endpoint names its action through `Routes`, or is marked `open_to_all`. `AdmittedRoute` refuses to be
created without such a mark. It checks the caller's right before the body is parsed and before the handler runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from connectors.hub.serving.answers import INTERNAL, ApiError, RefusalRecorder, error_response, first_fault
from connectors.hub.serving.api_document import BEARER
from connectors.hub.serving.bounded_http import note_principal, peer_is_gone
from connectors.hub.serving.identities import Identities, Unidentified
from connectors.hub.serving.models import ERRORS
from connectors.hub.serving.policy import Action, Caller, decide, needs_owner, roles_with
from connectors.hub.serving.strict_request import NotRead, StrictRequest
from connectors.hub.serving.turns import FairTurns, RefusalPace
from schemas.streams.principal.principals import OPERATOR
from schemas.streams.refused.refusal import RefusalReason
from schemas.streams.task.task_registry import TokenRow
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import MALFORMED, POLICY, TOO_LARGE, UNAUTHORIZED

log = structlog.stdlib.get_logger(__name__)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
OwnerOf = Callable[[Request], Awaitable[str | None]]
"""Returns the owner of the thing that a request is about; None when it has no known owner.

`request.state.caller` is the caller, whose right has not been checked yet.
"""

WhyRefused = Callable[[Any, str], str]
"""Returns the reason to record, from the decoded body and the reason of the refusal."""

_RECORDED: Final[dict[str, RefusalReason]] = {MALFORMED: MALFORMED, TOO_LARGE: TOO_LARGE}
Admission = tuple[Action, OwnerOf, WhyRefused]
"""How the gate admits the requests of a route."""
OPEN: Final = "open"
"""The admission of a route that needs no token."""
_REALM: Final = 'Bearer realm="trunkline"'


async def no_owner(request: Request) -> str | None:
    """Return None as the owner of the thing that a request is about. It is the default `owner_of` of a route.

    A caller with a right to its own things only (`Reach.OWN`) is then refused.
    """
    return None


def reason_alone(body: Any, why: str) -> str:
    """Return the reason of a refusal, without anything of the body."""
    return why


class Routes:
    """Adds endpoints to an application by the decorators `get`, `post`, `put` and `delete`.

    The arguments of a decorator are the path and the action that the caller needs a right to. Optional are the
    answer's model and a function that finds the owner. The routes of the application must be of the class
    `AdmittedRoute`.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.get = partial(self._add, "GET")
        self.post = partial(self._add, "POST")
        self.put = partial(self._add, "PUT")
        self.delete = partial(self._add, "DELETE")

    def _add(
        self,
        method: str,
        path: str,
        action: Action,
        answer: Any = None,
        owner_of: OwnerOf = no_owner,
        why_refused: WhyRefused = reason_alone,
        **options: Any,
    ) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds an endpoint.

        Args:
            method: The HTTP method.
            path: The path.
            action: The action that the caller must have a right to.
            answer: The model of the answer.
            owner_of: Returns the owner of the thing that a request is about.
            why_refused: Words the recorded reason for a malformed body.
            options: Further options of the FastAPI route.
        """

        def add(endpoint: Endpoint) -> Endpoint:
            endpoint.__trunkline_admission__ = (action, owner_of, why_refused)  # type: ignore[attr-defined]
            documented = {"response_model": answer, "responses": ERRORS, **options}
            self._app.add_api_route(path, endpoint, methods=[method], **documented)
            return endpoint

        return add


def open_to_all(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint, such as `/healthz`, as one that needs no token. Use it as a decorator."""
    endpoint.__trunkline_admission__ = OPEN  # type: ignore[attr-defined]
    return endpoint


class Gate:
    """The check of the token and rights of callers. It appends a record of each refusal to the log.

    Args:
        identities: The known tokens.
        refusals: Records refusals.
        body_limit_bytes: The largest body of a request.
        on_expired: Called with the row of a task's token that was used after its expiry. It must not block.
        turns: The turns in which the requests of principals begin.
        pace: Holds the answers of requests that exceed a limit.
    """

    def __init__(
        self,
        identities: Identities,
        refusals: RefusalRecorder,
        body_limit_bytes: int,
        on_expired: Callable[[TokenRow], None],
        turns: FairTurns,
        pace: RefusalPace,
    ) -> None:
        self._identities = identities
        self._refusals = refusals
        self._on_expired = on_expired
        self._turns = turns
        self._pace = pace
        self.body_limit_bytes = body_limit_bytes

    async def admit(self, request: Request, route: str, action: Action, owner_of: OwnerOf) -> Caller:
        """Return the caller of a request if it may perform an action; otherwise record the refusal and raise.

        Before that, wait until it is the principal's turn.

        Args:
            request: The HTTP request. `request.state.caller` is set to the caller.
            route: Method and path template of the route, such as `GET /api/hub/jobs/{job_id}`, for the record.
            action: The action that the caller needs a right to.
            owner_of: Returns the owner of the thing that the request is about. It is called only if the right
                depends on the owner.

        Raises:
            ApiError: 401 without a valid token, 403 without a right to the action, 503 if the principal has too
                many connections. Errors of `owner_of` are raised, too.
        """
        caller = self._identities.identify(request.headers.get("authorization"))
        if isinstance(caller, Unidentified):
            self._refusals.record(UNAUTHORIZED, caller.why, caller.principal, route)
            if caller.expired is not None:
                self._on_expired(caller.expired)
            raise ApiError(401, UNAUTHORIZED, caller.why, {"WWW-Authenticate": _REALM})
        request.state.caller = caller
        note_principal(request.scope, caller.principal, is_operator=caller.role == OPERATOR)
        await self._turns.wait(caller.principal)
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

    async def serve(
        self,
        request: StrictRequest,
        path: str,
        admission: Admission,
        handle: Callable[[Request], Coroutine[Any, Any, Response]],
    ) -> Response:
        """Return the response of a handler, if the caller may have it. `path` is the route's path template.

        A refusal is recorded and raised, as ApiError or, for an invalid request, as RequestValidationError.
        Other errors are raised as by `answered`.
        """
        (action, owner_of, why_refused), route = admission, f"{request.method} {path}"
        request.scope["trunkline_route"] = path
        caller = await self.admit(request, route, action, owner_of)
        request.scope["trunkline_principal"] = caller.principal
        try:
            return await answered(handle, request, path)
        except (ApiError, RequestValidationError) as error:
            self.note_fault(error, caller, route, why_refused)
            await self.hold(error, caller)
            raise

    async def hold(self, error: Exception, caller: Caller) -> None:
        """Wait before the answer to an admitted caller's request that exceeds a limit (429).

        The wait is short, and there is none for the first refusals or after any other error.
        """
        await self._pace.hold(caller.principal, error)

    def note_fault(
        self, error: Exception, caller: Caller, route: str, why_refused: WhyRefused = reason_alone
    ) -> None:
        """Append a record of an admitted caller's request that is malformed (400) or too large (413).

        It returns nothing and does not raise `error`. Other errors, and bodies that were not read to the end,
        are ignored.

        Args:
            error: The error that the handler raised.
            caller: The caller of the request, as `admit` has returned it.
            route: Method and path template of the route.
            why_refused: Returns the text to record, from the decoded body and the fault. The record contains no
                other part of the body. By default, the text is the fault.
        """
        if isinstance(error, RequestValidationError):
            why = why_refused(error.body, first_fault(error))
            self._refusals.record(MALFORMED, why, caller.principal, route)
        elif isinstance(error, ApiError) and not isinstance(error, NotRead):
            reason = _RECORDED.get(error.reason)
            if reason is not None:
                self._refusals.record(reason, str(error.detail), caller.principal, route)

    def still_holds(self, request: Request) -> bool:
        """Return whether the token of an admitted request still has the same caller with the same rights.

        The result is False for a token that was revoked or has expired. Call it only after `admit` for this
        request. A stream calls it again and again, and ends when the result is False.
        """
        found = self._identities.identify(request.headers.get("authorization"))
        return bool(found == request.state.caller)

    async def is_gone(self, request: Request, *, is_probed: bool = False) -> bool:
        """Return whether the client of an admitted request that has waited has disconnected meanwhile.

        With `is_probed`, a client whose machine does not answer within 2 s counts, too. Raises ApiError (401)
        if the token was revoked or has expired.
        """
        if not self.still_holds(request):
            raise token_ended()
        return await (peer_is_gone(request.scope) if is_probed else request.is_disconnected())


def token_ended() -> ApiError:
    """Return the error for a client whose token was revoked or has expired while it waited."""
    return ApiError(401, UNAUTHORIZED, "the token is no longer valid", {"WWW-Authenticate": _REALM})


class AdmittedRoute(APIRoute):
    """A FastAPI route whose handler runs only for callers that the gate admits.

    The application stores its gate in `app.state.gate`. The constructor raises TypeError if the endpoint
    neither names an action (`Routes`) nor is marked `open_to_all`.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not hasattr(endpoint, "__trunkline_admission__"):
            raise TypeError(f"route {path}: its endpoint has neither an action (Routes) nor open_to_all")
        self.admission = endpoint.__trunkline_admission__
        if self.admission != OPEN:
            # No FastAPI security dependency: the gate has read the token already.
            options["openapi_extra"] = {
                **(options["openapi_extra"] or {}),
                "x-trunkline-action": str(self.admission[0]),
                "x-trunkline-roles": roles_with(self.admission[0]),
                "security": [{BEARER: []}],
            }
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the coroutine function that handles a request. FastAPI calls this method.

        The returned function first checks the caller, and then calls the endpoint. A refused caller gets an
        ApiError. An unexpected error of the endpoint is logged without its text, and answered with status 500.
        """
        handle = super().get_route_handler()
        admission, path = self.admission, self.path

        async def admitted(request: Request) -> Response:
            gate: Gate = request.app.state.gate
            strict = StrictRequest(request.scope, request.receive, gate.body_limit_bytes)
            if admission != OPEN:
                return await gate.serve(strict, path, admission, handle)
            strict.scope["trunkline_route"] = path
            return await answered(handle, strict, path)

        return admitted


async def answered(
    handle: Callable[[Request], Coroutine[Any, Any, Response]], request: Request, path: str
) -> Response:
    """Return the response of a handler. An unexpected error is logged without its text, and gives status 500.

    ApiErrors, TrunklineErrors and errors of the framework are raised. `path` is the route's path template.
    """
    try:
        return await handle(request)
    except (ApiError, TrunklineError):
        raise
    except Exception as error:
        if type(error).__module__.startswith(("fastapi.", "starlette.")):
            raise
        # The text of the error stays out: it may quote a secret.
        where = "".join(traceback.format_tb(error.__traceback__)[-4:])
        log.error("handler_failed", error=type(error).__name__, route=path, where=where)
        return error_response(500, INTERNAL, "the gateway failed; see its log")
