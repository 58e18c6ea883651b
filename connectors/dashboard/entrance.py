"""Who comes in to the dashboard: bearer token or cookie, login and logout."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request, Response

from connectors.dashboard.logins import NEEDED, SESSION_S, Logins
from connectors.gateway.web.answers import ApiError, json_answer, malformed
from connectors.gateway.web.bounded_http import note_principal
from connectors.gateway.web.identities import Unidentified
from connectors.gateway.web.policy import Caller, decide
from connectors.gateway.web.refusals import RefusalRecorder
from connectors.gateway.web.strict_request import StrictRequest
from schemas.wire.verdicts import POLICY, UNAUTHORIZED

_REALM: Final = 'Bearer realm="trunkline dashboard"'
_TOKEN_LIMIT: Final = 1024


class Entrance:
    """Asked by each handler, with the template of its route."""

    def __init__(
        self, logins: Logins, refusals: RefusalRecorder, port: int, *, is_secure: bool = False
    ) -> None:
        self.logins = logins
        self._is_secure = is_secure
        self._refusals = refusals
        # Cookies know no ports: two dashboards on one machine must not throw out each other's.
        self.cookie_name = f"trunkline_{port}"

    def admit(self, request: Request, route: str) -> Caller:
        """The caller, who may look. Raises ApiError: 401 for nobody known, 403 without the right."""
        request.scope["trunkline_route"] = route
        caller = self._caller(request)
        # Each page begins without a cookie: that is answered, and not worth a record.
        came_with_something = "authorization" in request.headers or self.cookie_name in request.cookies
        self.check(caller, f"{request.method} {route}", came_with_something)
        assert isinstance(caller, Caller)  # noqa: S101  for the type checker
        note_principal(request.scope, caller.principal)
        request.scope["trunkline_principal"] = caller.principal
        return caller

    def check(self, caller: Caller | Unidentified, route: str, is_recorded: bool = True) -> None:
        """Raise ApiError for who may not look, and record it."""
        if isinstance(caller, Unidentified):
            if is_recorded:
                self._refusals.record(UNAUTHORIZED, caller.why, caller.principal, route)
            raise ApiError(401, UNAUTHORIZED, caller.why, {"WWW-Authenticate": _REALM})
        decision = decide(caller, NEEDED)
        if not decision.allowed:
            self._refusals.record(POLICY, decision.why, caller.principal, route)
            raise ApiError(403, POLICY, decision.why)

    def still_holds(self, request: Request, caller: Caller) -> bool:
        """Whether a long answer's caller may still look."""
        return self._caller(request) == caller

    def _caller(self, request: Request) -> Caller | Unidentified:
        return self.logins.caller_of(
            request.headers.get("authorization"), request.cookies.get(self.cookie_name)
        )

    def set_cookie(self, answer: Response, value: str) -> None:
        """Give a browser its cookie; "" takes it away."""
        life = f"Max-Age={SESSION_S if value else 0}"
        flags = "Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if self._is_secure else "")
        answer.headers["set-cookie"] = f"{self.cookie_name}={value}; {life}; {flags}"


def add_login_routes(app: FastAPI, entrance: Entrance, body_limit_bytes: int) -> None:
    """Add `/api/login` and `/api/logout`."""

    @app.post("/api/login")
    async def login(request: Request) -> Response:
        """Take a token, give a cookie."""
        request.scope["trunkline_route"] = "/api/login"
        # Only what a script of our own page can send: no form of another page has this type.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise malformed("a login is application/json")
        body = await StrictRequest(request.scope, request.receive, body_limit_bytes).json()
        token = body.get("token") if isinstance(body, dict) else None
        if not isinstance(token, str) or not 0 < len(token) <= _TOKEN_LIMIT:
            raise malformed('a login is {"token": "..."}')
        caller, cookie = entrance.logins.cookie_for(token)
        entrance.check(caller, "POST /api/login")
        assert isinstance(caller, Caller)  # noqa: S101  for the type checker
        note_principal(request.scope, caller.principal)
        request.scope["trunkline_principal"] = caller.principal
        answer = json_answer({"principal": caller.principal, "role": caller.role})
        entrance.set_cookie(answer, cookie)
        return answer

    @app.post("/api/logout")
    async def logout(request: Request) -> Response:
        """Forget the cookie."""
        request.scope["trunkline_route"] = "/api/logout"
        answer = json_answer({})
        entrance.set_cookie(answer, "")
        return answer
