"""Who looks at the dashboard: a bearer token, or the cookie that a login with such a token gives.

The cookie is no token. A browser sends cookies to every port of a host, so whoever else listens on this
machine may get to see it: it opens the dashboard, which only reads, and nothing else. It names its principal
and part of the token's hash, under a MAC that every gateway of this log can check, and is worth nothing once
the token is revoked.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Final

from connectors.gateway.web.identities import Identities, Unidentified
from connectors.gateway.web.policy import Action, Caller, decide
from connectors.live.live_view import LiveView
from schemas.fold.view_rows import REGISTRY_PRINCIPALS, PrincipalRow
from schemas.keys.sealing import Keyring
from schemas.streams.principal.principals import ACTIVE, OPERATOR, token_hash

SESSION_S: Final = 7 * 24 * 3600
_PURPOSE: Final = "dashboard login"
_DIGEST_LENGTH: Final = 32
_COOKIE_LIMIT: Final = 512
# All that the dashboard shows is read by those who may follow everything.
NEEDED: Final = Action.EVENTS_READ


class Logins:
    """Gives cookies and knows them again. `clock`: seconds since 1970 UTC."""

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
        """Who asks, by the header if there is one, else by the cookie."""
        if authorization is not None or cookie is None:
            return self._identities.identify(authorization)
        return self._of_cookie(cookie)

    def cookie_for(self, token: str) -> tuple[Caller | Unidentified, str]:
        """Whose token it is, and the cookie for it; "" for who gets none."""
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
            return Unidentified("log in again: it is a week ago", principal)
        if principal == OPERATOR:
            if hmac.compare_digest(digest, self._operator_digest):
                return Caller(OPERATOR, OPERATOR)
        else:
            row = self._live_view.row(REGISTRY_PRINCIPALS, principal)
            if isinstance(row, PrincipalRow) and row.status == ACTIVE and row.token_sha256.startswith(digest):
                return Caller(row.principal, row.role)
        return Unidentified("log in again: the token is revoked", principal)

    def _mac(self, said: str) -> str:
        return hmac.digest(self._key, said.encode(), "sha256").hex()
