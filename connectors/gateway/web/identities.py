"""Whose token it is: the operator's from its file, those of principals and tasks by the SHA-256 that the log
holds of them.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connectors.gateway.web.policy import Caller
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import REGISTRY_PRINCIPALS, REGISTRY_TOKENS, PrincipalRow, Row, TokenRow
from schemas.streams.principal.principals import ACTIVE, AGENT, OPERATOR, token_hash


@dataclass(frozen=True)
class Unidentified:
    """Nobody that may come in. `principal`: whose token it was, where that is known; `expired`: the token, if
    it is one of a task whose time is over.
    """

    why: str
    principal: str | None = None
    expired: TokenRow | None = None


class Identities:
    """Principals and tasks' tokens by token hash, kept up to date by the live view's changes. Thread-safe: one
    thread changes, any thread looks up. `clock`: seconds since 1970 UTC.
    """

    def __init__(self, operator_token: str, clock: Callable[[], float] = time.time) -> None:
        self._operator_hash = token_hash(operator_token)
        self._clock = clock
        self._rows: dict[str, PrincipalRow] = {}
        self._tokens: dict[str, TokenRow] = {}
        self._lock = threading.Lock()
        # Until the rows are loaded: what was revoked meanwhile, and may come as active among them.
        self._revoked: set[str] | None = set()

    def load(self, rows: Iterable[Row]) -> None:
        """Take in what the live view held when it was opened; what came by `changed` meanwhile is newer."""
        for row in rows:
            if isinstance(row, PrincipalRow):
                known = self._rows.setdefault(row.token_sha256, row)
                if row.status != ACTIVE and known.status == ACTIVE:
                    self._rows[row.token_sha256] = row
            elif isinstance(row, TokenRow):
                self._take_token(row)
        with self._lock:
            self._revoked = None

    def changed(self, change: AppliedChange) -> None:
        """Take in a change of the live view."""
        if change.view == REGISTRY_PRINCIPALS and isinstance(change.row, PrincipalRow):
            self._rows[change.row.token_sha256] = change.row
        elif change.view == REGISTRY_TOKENS and isinstance(change.row, TokenRow):
            self._take_token(change.row)

    def _take_token(self, row: TokenRow) -> None:
        # A token is revoked once and for ever, and there are many: the revoked ones are not kept.
        with self._lock:
            if row.status != ACTIVE:
                if self._revoked is not None:
                    self._revoked.add(row.token_sha256)
                self._tokens.pop(row.token_sha256, None)
            elif self._revoked is None or row.token_sha256 not in self._revoked:
                self._tokens[row.token_sha256] = row

    def identify(self, authorization: str | None) -> Caller | Unidentified:
        """Who sent this `Authorization` header."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return Unidentified("no bearer token")
        # Only hashes are compared, so the time taken tells nothing of a token.
        digest = token_hash(token)
        if hmac.compare_digest(digest, self._operator_hash):
            return Caller(OPERATOR, OPERATOR)
        token_row = self._tokens.get(digest)
        if token_row is not None:
            return self._agent(token_row)
        row = self._rows.get(digest)
        if row is None:
            return Unidentified("the token is not known, or revoked")
        if row.status != ACTIVE:
            return Unidentified("the token is revoked", row.principal)
        return Caller(row.principal, row.role)

    def _agent(self, row: TokenRow) -> Caller | Unidentified:
        if row.expiry <= self._clock() * 1000:
            return Unidentified("the token has expired", row.agent_name, row)
        return Caller(row.agent_name, AGENT, row.task_id, row.token_id, tuple(row.capabilities))
