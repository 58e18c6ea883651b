"""Identities of callers, and what follows from them: ids of repeated requests (CM-04), derived credentials.

`Identities` is an index of the live view. The operator's token comes from its file. The tokens of principals
and tasks are known by their SHA-256 alone. A request's idempotency key gives each thing that it makes the same
id again. The credentials of a task are its token (HH-02), and the private key of its agent (AM-09).
"""

from __future__ import annotations

import base64
import hmac
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, TypedDict

from fastapi import Header, Request

from connectors.hub.live.row_lists import RowIndex
from connectors.hub.serving.policy import Caller
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.principal.principals import ACTIVE, AGENT, OPERATOR, PrincipalRow, token_hash
from schemas.streams.task.task_registry import TokenRow
from trunkline_agent.mcp.signing import load_private_key, new_key_pair, public_pem

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


class Identities(RowIndex[PrincipalRow | TokenRow]):
    """An index of tokens by their hash, kept up to date by the changes of the live view.

    Thread-safe for one thread that calls `changed` and any number of readers. `clock`: seconds since 1970 UTC.
    """

    def __init__(self, operator_token: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(PrincipalRow, TokenRow)
        self._operator_hash = token_hash(operator_token)
        self._clock = clock
        self._rows: dict[str, PrincipalRow] = {}
        self._tokens: dict[str, TokenRow] = {}

    def _add(self, row: PrincipalRow | TokenRow) -> None:
        if isinstance(row, PrincipalRow):
            self._rows[row.token_sha256] = row
        elif row.status == ACTIVE:
            self._tokens[row.token_sha256] = row
        else:
            # There are many tokens, and a revoked one never becomes active again, so it is forgotten.
            self._tokens.pop(row.token_sha256, None)

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


NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "urn:trunkline:request")
# Random bytes for so many UUIDs are got at once. In each system call other threads of Python may go first.
_UUIDS: Final = 256
_UUID_BYTES: Final = 16
_random: Final[deque[bytes]] = deque()
# A repeated request returns the same token only within this time after the token was made.
TOKEN_WINDOW_S: Final = 24 * 3600.0

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="A request with a key that was used before is the same request and gets the same answer.",
    ),
]
"""The header, 1 to 255 visible ASCII characters."""


def request_uuid(requester: str, key: str | None) -> uuid.UUID:
    """Return the UUID of the thing that a request makes, such as a message or a job.

    The same requester and idempotency key give the same UUID, whatever the body. Without a key (None) the UUID
    is random. `requester` is the namespace of the caller's keys, see `Caller.requester`. `key` is the header
    `Idempotency-Key`.
    """
    return random_uuid() if key is None else uuid.uuid5(uuid.uuid5(NAMESPACE, requester), key)


def random_uuid() -> uuid.UUID:
    """Return a random UUID (RFC 9562, version 4). May be called on any thread."""
    try:
        chosen = _random.popleft()
    except IndexError:
        many = os.urandom(_UUIDS * _UUID_BYTES)
        _random.extend(many[at : at + _UUID_BYTES] for at in range(0, len(many), _UUID_BYTES))
        return random_uuid()
    return uuid.UUID(bytes=chosen, version=4)


class Origin(TypedDict):
    """The door and the principal of a record, as arguments of the functions that build records."""

    door: str
    principal: str


def caller_of(request: Request) -> Caller:
    """Return the authenticated sender of a request."""
    found: Caller = request.state.caller
    return found


def url_safe(secret: bytes) -> str:
    """Return `secret` in URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(secret).decode("ascii").rstrip("=")


def derived_token(keyring: Keyring, made: uuid.UUID, name: str, known_sha256: str | None = None) -> str:
    """Return the token of the principal that a request adds, as URL-safe base64.

    Args:
        keyring: The master keys.
        made: The UUID of the request, as `request_uuid` returns it.
        name: The name of the principal.
        known_sha256: The hash of the principal's existing token; None for a new principal.
    """
    return _derived(keyring, f"principal-token/{name}/{made}", url_safe, known_sha256)


def task_token(keyring: Keyring, task_id: str, token_id: str | None = None) -> str:
    """Return the token with which the agent of a task authenticates itself, a UUID with 122 secret bits.

    Args:
        keyring: The master keys.
        task_id: The id of the task.
        token_id: The first digits of the hash of the task's existing token; None for a new task.
    """
    return _derived(keyring, f"task-token/{task_id}", _as_uuid, token_id)


def _derived(keyring: Keyring, purpose: str, form: Callable[[bytes], str], known: str | None) -> str:
    """Return a token that is derived from a master key and its purpose, in a form.

    So it is stored nowhere, and a repeated request gets the same one. `known` are the first digits of the hash
    of an existing token, which may come from an earlier master key, so each key is tried. If none yields such a
    token, or there is none (None), it is the token of the active key.
    """
    for one in keyring.each() if known is not None else ():
        token = form(one.derive(purpose))
        if token_hash(token).startswith(known or ""):
            return token
    return form(keyring.derive(purpose))


def _as_uuid(secret: bytes) -> str:
    return str(uuid.UUID(bytes=secret[:16], version=4))


class AgentKeyFiles:
    """The private keys of agents that the gateway starts: one file with mode 0600 for each task.

    The files are in the folder `agent_mcp.keys_path`.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.agent_keys_path

    def make(self, task_id: str) -> tuple[Path, str]:
        """Create a key pair for a task's agent, and write the private key to the task's file.

        If the file exists, because an earlier launch was interrupted, nothing is written, and its key is
        returned.

        Returns:
            The path of the private key's file, and the public key in PEM.

        Raises:
            OSError: The file cannot be read or written.
            ValueError: The existing file is no private key.
        """
        path = self.path_of(task_id)
        if path.exists():
            return path, public_pem(load_private_key(path.read_bytes()))
        private, public = new_key_pair()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._folder / f".{task_id}.{os.getpid()}"
        # Other users must not read the file, not even while it is written.
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(private)
        draft.replace(path)
        return path, public

    def path_of(self, task_id: str) -> Path:
        """Return the absolute path of the private key's file for a task's agent. The file need not exist."""
        return (self._folder / f"{task_id}.pem").absolute()

    def remove(self, task_id: str) -> None:
        """Delete the file with the private key of a task's agent. Without such a file, nothing happens."""
        self.path_of(task_id).unlink(missing_ok=True)
