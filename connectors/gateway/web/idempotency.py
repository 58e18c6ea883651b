"""Requests that are sent again (CM-04): what a request makes has an id that follows from its key."""

from __future__ import annotations

import base64
import uuid
from typing import Annotated, Final

from fastapi import Header

from schemas.keys.sealing import Keyring
from schemas.streams.principal.principals import token_hash

NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "urn:trunkline:request")
# How long after it was made a token is told again.
TOKEN_WINDOW_S: Final = 24 * 3600.0

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="The same key again is the same request, and has the same answer.",
    ),
]
"""The header, 1 to 255 visible ASCII characters."""


def request_uuid(principal: str, key: str | None) -> uuid.UUID:
    """The id of what a request makes: `uuid5(principal, key)`, a random one without a key."""
    return uuid.uuid4() if key is None else uuid.uuid5(uuid.uuid5(NAMESPACE, principal), key)


def derived_token(keyring: Keyring, made: uuid.UUID, name: str, known_sha256: str | None = None) -> str:
    """The token of the principal `name` that the request `made` adds: the same for the same request, so it
    need not be kept, and unknown to whoever has no master key. `known_sha256`: of the token that the principal
    has already, perhaps of a master key that was active then.
    """
    purpose = f"principal-token/{name}/{made}"
    for one in keyring.each() if known_sha256 is not None else ():
        token = _text(one.derive(purpose))
        if token_hash(token) == known_sha256:
            return token
    return _text(keyring.derive(purpose))


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")
