"""Whose token it is: the operator's from its file, all others by the SHA-256 that the log holds of them."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from connectors.gateway.policy import Caller
from schemas.principals import ACTIVE, OPERATOR, token_hash
from schemas.settled import AppliedChange
from schemas.view_rows import REGISTRY_PRINCIPALS, PrincipalRow, ViewRow


@dataclass(frozen=True)
class Unidentified:
    """Nobody that may come in. `principal`: whose token it was, where that is known."""

    why: str
    principal: str | None = None


class Identities:
    """The principals by token hash, kept up to date by the live view's changes. Thread-safe: one thread
    changes, any thread looks up.
    """

    def __init__(self, operator_token: str) -> None:
        self._operator_hash = token_hash(operator_token)
        self._rows: dict[str, PrincipalRow] = {}

    def load(self, rows: Iterable[ViewRow]) -> None:
        """Take in what the live view held when it was opened; what came by `changed` meanwhile is newer."""
        for row in rows:
            if isinstance(row, PrincipalRow):
                known = self._rows.setdefault(row.token_sha256, row)
                if row.status != ACTIVE and known.status == ACTIVE:
                    self._rows[row.token_sha256] = row

    def changed(self, change: AppliedChange) -> None:
        """Take in a change of the live view."""
        if change.view == REGISTRY_PRINCIPALS and isinstance(change.row, PrincipalRow):
            self._rows[change.row.token_sha256] = change.row

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
        row = self._rows.get(digest)
        if row is None:
            return Unidentified("the token is not known")
        if row.status != ACTIVE:
            return Unidentified("the token is revoked", row.principal)
        return Caller(row.principal, row.role)
