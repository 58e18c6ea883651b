"""Authentication at the dashboard: a bearer token, or the cookie that a login with such a token gives.

The cookie is not a token. A browser sends cookies to every port of a host, so another program that listens on
this machine may see it. It opens only the dashboard, which only reads. It names its principal and part of the
token's hash, under a MAC that every gateway of this log can check. It is invalid once the token is revoked.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Final

from fastapi import FastAPI, Request, Response

from connectors.gateway.web.answers import ApiError, json_answer, malformed
from connectors.gateway.web.bounded_http import note_principal
from connectors.gateway.web.identities import Identities, Unidentified
from connectors.gateway.web.policy import Action, Caller, decide
from connectors.gateway.web.refusals import RefusalRecorder
from connectors.gateway.web.strict_request import StrictRequest
from connectors.live.live_view import LiveView
from schemas.keys.sealing import Keyring
from schemas.streams.principal.principals import ACTIVE, OPERATOR, PrincipalRow, token_hash
from schemas.wire.verdicts import POLICY, UNAUTHORIZED

SESSION_S: Final = 7 * 24 * 3600
_PURPOSE: Final = "dashboard login"
_DIGEST_LENGTH: Final = 32
_COOKIE_LIMIT: Final = 512
# The right to look at the dashboard is the right to follow all events.
NEEDED: Final = Action.EVENTS_READ


class Logins:
    """Issues cookies and checks them. `clock` returns seconds since 1970 UTC."""

    def __init__(
        self,
        keyring: Keyring,
        identities: Identities,
        operator_token: str,
        live_view: LiveView,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = keyring.derive(_PURPOSE)
        self._identities = identities
        self._operator_digest = token_hash(operator_token)[:_DIGEST_LENGTH]
        self._live_view = live_view
        self._clock = clock

    def caller_of(self, authorization: str | None, cookie: str | None) -> Caller | Unidentified:
        """Return the caller, by the header if there is one, else by the cookie."""
        if authorization is not None or cookie is None:
            return self._identities.identify(authorization)
        return self._of_cookie(cookie)

    def cookie_for(self, token: str) -> tuple[Caller | Unidentified, str]:
        """Return the owner of a token and a cookie for it. The cookie is "" for an owner who may not look."""
        caller = self._identities.identify(f"Bearer {token}")
        if isinstance(caller, Unidentified) or not decide(caller, NEEDED).allowed:
            return caller, ""
        said = f"{round(self._clock()) + SESSION_S}:{caller.principal}:{token_hash(token)[:_DIGEST_LENGTH]}"
        return caller, f"{said}:{self._mac(said)}"

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
    """The check that each handler calls with the template of its route."""

    def __init__(
        self, logins: Logins, refusals: RefusalRecorder, port: int, *, is_secure: bool = False
    ) -> None:
        self.logins = logins
        self._is_secure = is_secure
        self._refusals = refusals
        # Cookies ignore ports, so the name keeps two dashboards on one machine from replacing each other's
        # cookie.
        self.cookie_name = f"trunkline_{port}"

    def admit(self, request: Request, route: str) -> Caller:
        """Return the caller of a request.

        Raises ApiError: 401 for an unknown caller, 403 for one without the right to look.
        """
        request.scope["trunkline_route"] = route
        caller = self._caller(request)
        # Each page starts without a cookie. That refusal is not worth a record.
        came_with_something = "authorization" in request.headers or self.cookie_name in request.cookies
        return self.check(request, caller, f"{request.method} {route}", came_with_something)

    def check(
        self, request: Request, caller: Caller | Unidentified, route: str, is_recorded: bool = True
    ) -> Caller:
        """Return the caller if it may look; else record the refusal and raise ApiError."""
        if isinstance(caller, Unidentified):
            if is_recorded:
                self._refusals.record(UNAUTHORIZED, caller.why, caller.principal, route)
            raise ApiError(401, UNAUTHORIZED, caller.why, {"WWW-Authenticate": _REALM})
        decision = decide(caller, NEEDED)
        if not decision.allowed:
            self._refusals.record(POLICY, decision.why, caller.principal, route)
            raise ApiError(403, POLICY, decision.why)
        note_principal(request.scope, caller.principal)
        request.scope["trunkline_principal"] = caller.principal
        return caller

    def still_holds(self, request: Request, caller: Caller) -> bool:
        """Return whether the caller of a long answer may still look."""
        return self._caller(request) == caller

    def _caller(self, request: Request) -> Caller | Unidentified:
        return self.logins.caller_of(
            request.headers.get("authorization"), request.cookies.get(self.cookie_name)
        )

    def set_cookie(self, answer: Response, value: str) -> None:
        """Set the browser's cookie; the value "" deletes it."""
        life = f"Max-Age={SESSION_S if value else 0}"
        flags = "Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if self._is_secure else "")
        answer.headers["set-cookie"] = f"{self.cookie_name}={value}; {life}; {flags}"


def add_login_routes(app: FastAPI, entrance: Entrance, body_limit_bytes: int) -> None:
    """Add `/api/login` and `/api/logout`."""

    @app.post("/api/login")
    async def login(request: Request) -> Response:
        """Check a token and set a cookie."""
        request.scope["trunkline_route"] = "/api/login"
        # Only a script of our own page can send this type; a form of another page cannot.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise malformed("a login must be application/json")
        body = await StrictRequest(request.scope, request.receive, body_limit_bytes).json()
        token = body.get("token") if isinstance(body, dict) else None
        if not isinstance(token, str) or not 0 < len(token) <= _TOKEN_LIMIT:
            raise malformed('the body of a login is {"token": "..."}')
        found, cookie = entrance.logins.cookie_for(token)
        caller = entrance.check(request, found, "POST /api/login")
        answer = json_answer({"principal": caller.principal, "role": caller.role})
        entrance.set_cookie(answer, cookie)
        return answer

    @app.post("/api/logout")
    async def logout(request: Request) -> Response:
        """Delete the cookie."""
        request.scope["trunkline_route"] = "/api/logout"
        answer = json_answer({})
        entrance.set_cookie(answer, "")
        return answer
