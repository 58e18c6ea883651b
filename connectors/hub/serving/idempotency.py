"""Repeated requests (CM-04): a request's idempotency key gives each thing that it makes the same id again."""

from __future__ import annotations

import base64
import os
import uuid
from collections import deque
from typing import Annotated, Final, TypedDict

from fastapi import Header, Request

from connectors.hub.serving.policy import Caller
from schemas.keys.sealing import Keyring
from schemas.streams.principal.principals import token_hash

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

    The token is derived from a master key and the request. So a repeated request gets the same token, although
    no token is stored. If no master key yields a token with `known_sha256`, the token of the active key is
    returned.

    Args:
        keyring: The master keys.
        made: The UUID of the request, as `request_uuid` returns it.
        name: The name of the principal.
        known_sha256: The hash of the principal's existing token. That token may come from an earlier master
            key, so each key is tried. None for a new principal: the active key is used.
    """
    purpose = f"principal-token/{name}/{made}"
    for one in keyring.each() if known_sha256 is not None else ():
        token = url_safe(one.derive(purpose))
        if token_hash(token) == known_sha256:
            return token
    return url_safe(keyring.derive(purpose))
