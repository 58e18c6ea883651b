"""Authentication at the dashboard: a bearer token, or the cookie that a login with such a token gives.

The cookie is not a token. A browser sends cookies to every port of a host, so another program that listens on
this machine may see the cookie. With it, that program can only read the dashboard. The cookie contains the
principal, an expiry time and a part of the token's hash. A MAC protects it, and every gateway of this log can
check it. The cookie is invalid after seven days, and as soon as the token is revoked.

A change, such as the replay of a dead message, needs more than the cookie: the page's Origin, and the change
key in a header. The answer to a login contains the change key. It is a MAC over the cookie, so it is valid only
with this cookie and as long as it. The page keeps the key in the storage of its origin and tab. No program on
another port and no other site can read it there. A browser never adds this header by itself, so another site
cannot make it send a change (CSRF). A request with a bearer token needs no change key, because the browser does
not add the token by itself either. The rights are those at the hub, and a refusal is recorded as there.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Final

from fastapi import FastAPI, Request, Response

from connectors.hub.live.live_view import LiveView
from connectors.hub.serving.answers import ApiError, RefusalRecorder, json_answer, malformed
from connectors.hub.serving.bounded_http import note_principal
from connectors.hub.serving.identities import Identities, Unidentified
from connectors.hub.serving.policy import Action, Caller, Decision, decide
from connectors.hub.serving.strict_request import StrictRequest
from schemas.keys.sealing import Keyring
from schemas.streams.principal.principals import ACTIVE, OPERATOR, PrincipalRow, token_hash
from trunkline_agent.wire.verdicts import POLICY, UNAUTHORIZED

SESSION_S: Final = 7 * 24 * 3600
CHANGE_KEY: Final = "X-Trunkline-Change-Key"
# The reason of a refused change that succeeds after a login in the same tab.
LOGIN_NEEDED: Final = "login_needed"
_PURPOSE: Final = "dashboard login"
_CHANGE_PURPOSE: Final = "dashboard change"
_DIGEST_LENGTH: Final = 32
_COOKIE_LIMIT: Final = 512
# The right to look at the dashboard is the right to follow all events.
NEEDED: Final = Action.EVENTS_READ


class Logins:
    """Issues and checks login cookies. `clock` returns the time in seconds since 1970 UTC."""

    def __init__(
        self,
        keyring: Keyring,
        identities: Identities,
        operator_token: str,
        live_view: LiveView,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = keyring.derive(_PURPOSE)
        self._change_key = keyring.derive(_CHANGE_PURPOSE)
        self._identities = identities
        self._operator_digest = token_hash(operator_token)[:_DIGEST_LENGTH]
        self._live_view = live_view
        self._clock = clock

    def caller_of(self, authorization: str | None, cookie: str | None) -> Caller | Unidentified:
        """Return the caller that an `Authorization` header or, without one, a login cookie belongs to.

        None means that the request lacks the header or the cookie. Returns Unidentified, with the reason, for a
        missing, wrong, expired or revoked token or cookie. This method does not check whether the caller may
        see the dashboard.
        """
        if authorization is not None or cookie is None:
            return self._identities.identify(authorization)
        return self._of_cookie(cookie)

    def cookie_for(self, token: str) -> tuple[Caller | Unidentified, str]:
        """Return the owner of a token, and a new login cookie that is valid for seven days.

        If the token is invalid, the owner is Unidentified and the cookie "". If the owner may not see the
        dashboard, the cookie is "", too.
        """
        caller = self._identities.identify(f"Bearer {token}")
        if isinstance(caller, Unidentified) or not decide(caller, NEEDED).allowed:
            return caller, ""
        said = f"{round(self._clock()) + SESSION_S}:{caller.principal}:{token_hash(token)[:_DIGEST_LENGTH]}"
        return caller, f"{said}:{self._mac(said)}"

    def change_key(self, cookie: str) -> str:
        """Return the key that a change needs beside a login cookie: 64 hex digits, a MAC over the cookie.

        Give it only to a caller that has just presented the token. The cookie alone must not lead to it.
        """
        return hmac.digest(self._change_key, cookie.encode(), "sha256").hex()

    def _of_cookie(self, cookie: str) -> Caller | Unidentified:
        said, _, mac = cookie[:_COOKIE_LIMIT].rpartition(":")
        if not said or not mac.isascii() or not hmac.compare_digest(self._mac(said), mac):
            return Unidentified("log in again: the cookie is not one of this backbone")
        expiry, principal, digest = said.split(":")
        if int(expiry) <= self._clock():
            return Unidentified("log in again: the login has expired", principal)
        if principal == OPERATOR:
            if hmac.compare_digest(digest, self._operator_digest):
                return Caller(OPERATOR, OPERATOR)
        else:
            row = self._live_view.get(PrincipalRow, principal)
            if row is not None and row.status == ACTIVE and row.token_sha256.startswith(digest):
                return Caller(row.principal, row.role)
        return Unidentified("log in again: the token is revoked", principal)

    def _mac(self, said: str) -> str:
        return hmac.digest(self._key, said.encode(), "sha256").hex()


_REALM: Final = 'Bearer realm="trunkline dashboard"'
_TOKEN_LIMIT: Final = 1024


class Entrance:
    """Authentication and authorization of requests to the dashboard. Each handler calls `admit` first."""

    def __init__(
        self, logins: Logins, refusals: RefusalRecorder, port: int, *, is_secure: bool = False
    ) -> None:
        self.logins = logins
        self._is_secure = is_secure
        self._refusals = refusals
        # Cookies ignore ports, so the name keeps two dashboards on one machine from replacing each other's
        # cookie.
        self.cookie_name = f"trunkline_{port}"

    def admit(self, request: Request) -> Caller:
        """Return the caller of a request, or append the refusal to the log and raise ApiError.

        A request without a token and without a cookie is refused, but the refusal is not recorded: the first
        request of each browser is such a request. The request's scope gets the route and the principal, for the
        access log.

        Raises:
            ApiError: 401 for an unknown caller, 403 for one that may not see the dashboard. 503 if the
                principal has too many connections.
        """
        request.scope["trunkline_route"] = request.scope["route"].path
        # Each page starts without a cookie. That refusal is not worth a record.
        came_with_something = "authorization" in request.headers or self.cookie_name in request.cookies
        return self.check(request, self._caller(request), came_with_something)

    def check(self, request: Request, caller: Caller | Unidentified, is_recorded: bool = True) -> Caller:
        """Return the caller if it may see the dashboard; otherwise record the refusal and raise ApiError.

        Args:
            request: The HTTP request. Its scope has the route, and gets the principal, for the access log.
            caller: The caller that `Logins.caller_of` or `Logins.cookie_for` has returned.
            is_recorded: Whether a refusal with status 401 is appended to the log. One with 403 always is.

        Raises:
            ApiError: As `admit` does.
        """
        if isinstance(caller, Unidentified):
            if is_recorded:
                self._refusals.record(UNAUTHORIZED, caller.why, caller.principal, _route_of(request))
            raise ApiError(401, UNAUTHORIZED, caller.why, {"WWW-Authenticate": _REALM})
        self._require(request, caller, decide(caller, NEEDED))
        note_principal(request.scope, caller.principal, is_operator=caller.role == OPERATOR)
        request.scope["trunkline_principal"] = caller.principal
        return caller

    def check_change(self, request: Request, caller: Caller, action: Action, owner: str | None) -> None:
        """Return if a request may change something, or append the refusal to the log and raise ApiError.

        A request with a login cookie must also have the header `Origin`, which the guard has compared, and the
        change key of this cookie.

        Args:
            request: The HTTP request.
            caller: The caller that `admit` returned for it.
            action: The action of the route. The rights are those of the hub.
            owner: The owner of the thing that is changed, in a form of `Caller.owns`; None for no known owner.

        Raises:
            ApiError: 403. The reason is `login_needed` if the caller has only the cookie and must log in again,
                and `policy` if it may not perform the action.
        """
        self._require(request, caller, decide(caller, action, owner))
        if "authorization" in request.headers:
            return
        expected = self.logins.change_key(request.cookies.get(self.cookie_name, ""))
        given = request.headers.get(CHANGE_KEY, "").encode()
        is_ours = "origin" in request.headers and hmac.compare_digest(expected.encode(), given)
        why = "log in again in this tab to make changes: its login only lets you look"
        self._require(request, caller, Decision(is_ours, why), LOGIN_NEEDED)

    def _require(self, request: Request, caller: Caller, decision: Decision, reason: str = POLICY) -> None:
        """Record the refusal and raise ApiError (403) if the decision does not allow the request."""
        if not decision.allowed:
            self._refusals.record(POLICY, decision.why, caller.principal, _route_of(request))
            raise ApiError(403, reason, decision.why)

    def still_holds(self, request: Request, caller: Caller) -> bool:
        """Return whether the token or cookie of this request is still valid, for the same principal and role.

        `caller` is the caller that `admit` returned for the request. A stream of events calls this method again
        and again, and ends when the result is False.
        """
        return self._caller(request) == caller

    def _caller(self, request: Request) -> Caller | Unidentified:
        return self.logins.caller_of(
            request.headers.get("authorization"), request.cookies.get(self.cookie_name)
        )

    def set_cookie(self, answer: Response, value: str) -> None:
        """Add a `Set-Cookie` header with a login cookie to a response.

        `value` is a cookie that `Logins.cookie_for` returned. The value "" makes the browser delete its cookie.
        """
        life = f"Max-Age={SESSION_S if value else 0}"
        flags = "Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if self._is_secure else "")
        answer.headers["set-cookie"] = f"{self.cookie_name}={value}; {life}; {flags}"


def _route_of(request: Request) -> str:
    """Return method and path template of a request, such as `GET /api/jobs`."""
    return f"{request.method} {request.scope['trunkline_route']}"


def add_login_routes(app: FastAPI, entrance: Entrance, body_limit_bytes: int) -> None:
    """Add the routes `/api/login`, which sets the login cookie, and `/api/logout`, which deletes it.

    A login with a body of more than `body_limit_bytes` is refused with 413.
    """

    @app.post("/api/login")
    async def login(request: Request) -> Response:
        """Check the token in the JSON body, set the login cookie, and return principal, role and change key.

        The answer is 400 for a body that is not `{"token": "..."}` in JSON, 401 for an invalid token, and 403
        for a principal that may not see the dashboard.
        """
        request.scope["trunkline_route"] = "/api/login"
        # Only a script of our own page can send this type; a form of another page cannot.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise malformed("a login must be application/json")
        body = await StrictRequest(request.scope, request.receive, body_limit_bytes).json()
        token = body.get("token") if isinstance(body, dict) else None
        if not isinstance(token, str) or not 0 < len(token) <= _TOKEN_LIMIT:
            raise malformed('the body of a login is {"token": "..."}')
        found, cookie = entrance.logins.cookie_for(token)
        caller = entrance.check(request, found)
        who = {"principal": caller.principal, "role": caller.role}
        answer = json_answer({**who, "change_key": entrance.logins.change_key(cookie)})
        entrance.set_cookie(answer, cookie)
        return answer

    @app.post("/api/logout")
    async def logout(request: Request) -> Response:
        """Delete the browser's login cookie. The token stays valid."""
        request.scope["trunkline_route"] = "/api/logout"
        answer = json_answer({})
        entrance.set_cookie(answer, "")
        return answer
