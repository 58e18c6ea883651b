"""The principals and agents' tasks that bearer tokens belong to, as an index of the live view.

The operator's token comes from its file. The tokens of principals and tasks are known by their SHA-256 alone,
from the rows of the live view.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from connectors.hub.serving.policy import Caller
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.streams.principal.principals import ACTIVE, AGENT, OPERATOR, PrincipalRow, token_hash
from schemas.streams.task.task_registry import TokenRow

# The hashes of so many tokens are remembered, in headers of at most so many characters.
_DIGESTS: Final = 4096
_SHORT: Final = 512


@dataclass(frozen=True)
class Unidentified:
    """A request without a valid token.

    Attributes:
        why: The reason, for the client and the ledger.
        principal: The owner of the token, where it is known.
        expired: The row of a task's token that has expired.
    """

    why: str
    principal: str | None = None
    expired: TokenRow | None = None


class Identities:
    """An index of tokens by their hash, kept up to date by the changes of the live view.

    Thread-safe for one thread that calls `changed` and any number of readers. `clock`: seconds since 1970 UTC.
    """

    follows = (PrincipalRow, TokenRow)

    def __init__(self, operator_token: str, clock: Callable[[], float] = time.time) -> None:
        self._operator_hash = token_hash(operator_token)
        self._clock = clock
        self._rows: dict[str, PrincipalRow] = {}
        self._tokens: dict[str, TokenRow] = {}
        self._lock = threading.Lock()
        # Until `load` has ended: hashes revoked by `changed`, because `load` may bring them as active.
        self._revoked: set[str] | None = set()

    def load(self, rows: Iterable[Row]) -> None:
        """Add the principals and tokens that the live view contains when it is open.

        Call this method once, after `LiveView.open`. A row that `changed` has already added is newer, so it is
        kept.
        """
        for row in rows:
            if isinstance(row, PrincipalRow):
                known = self._rows.setdefault(row.token_sha256, row)
                if row.status != ACTIVE and known.status == ACTIVE:
                    self._rows[row.token_sha256] = row
            elif isinstance(row, TokenRow):
                self._add_token(row)
        with self._lock:
            self._revoked = None

    def changed(self, change: AppliedChange) -> None:
        """Update the index when the row of a principal or of a task's token changes.

        The live view's thread calls this method for each changed row. Other rows are ignored.
        """
        if isinstance(change.row, PrincipalRow):
            self._rows[change.row.token_sha256] = change.row
        elif isinstance(change.row, TokenRow):
            self._add_token(change.row)

    def _add_token(self, row: TokenRow) -> None:
        # There are many tokens, and a revoked one never becomes active again, so it is forgotten.
        with self._lock:
            if row.status != ACTIVE:
                if self._revoked is not None:
                    self._revoked.add(row.token_sha256)
                self._tokens.pop(row.token_sha256, None)
            elif self._revoked is None or row.token_sha256 not in self._revoked:
                self._tokens[row.token_sha256] = row

    def identify(self, authorization: str | None) -> Caller | Unidentified:
        """Return the principal or agent whose bearer token an `Authorization` header contains.

        `authorization` is the header's value; None if the request has no such header. Returns Unidentified,
        with the reason, for a missing, unknown, revoked or expired token.
        """
        is_short = authorization is not None and len(authorization) <= _SHORT
        digest = (_digest_of if is_short else _digest_of.__wrapped__)(authorization or "")
        if digest is None:
            return Unidentified("no bearer token")
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


@lru_cache(_DIGESTS)
def _digest_of(authorization: str) -> str | None:
    """Return the hash of the bearer token in a header, or None without one.

    Only hashes are compared, so the time taken reveals nothing of a token.
    """
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    return token_hash(token) if scheme.lower() == "bearer" and token else None
