"""Repeated requests (CM-04): the id of each thing that a request makes follows from its key."""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass
from typing import Annotated, Final, TypedDict

from fastapi import Depends, Header, Request

from connectors.gateway.web.policy import Caller
from connectors.gateway.web.refusals import DOOR
from schemas.keys.sealing import Keyring
from schemas.streams.principal.principals import token_hash

NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "urn:trunkline:request")
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
    """Return the id of the things that a request makes; without a key it is random."""
    return uuid.uuid4() if key is None else uuid.uuid5(uuid.uuid5(NAMESPACE, requester), key)


class Origin(TypedDict):
    """The origin of a record: the door, and the principal at the door."""

    door: str
    principal: str


@dataclass(frozen=True)
class Write:
    """A request that changes something.

    Attributes:
        caller: The authenticated sender.
        key: The idempotency key, None without one.
        made: The id of the things that the request makes, see `request_uuid`.
    """

    caller: Caller
    key: str | None
    made: uuid.UUID

    @property
    def principal(self) -> str:
        """The name of the caller."""
        return self.caller.principal

    @property
    def origin(self) -> Origin:
        """The door and the principal of the records that the request makes."""
        return {"door": DOOR, "principal": self.principal}

    @property
    def request_id(self) -> str:
        """The id `made` as text."""
        return str(self.made)


async def _caller(request: Request) -> Caller:
    found: Caller = request.state.caller
    return found


RequestCaller = Annotated[Caller, Depends(_caller)]
"""The parameter of a route that needs its caller."""


async def _write(caller: RequestCaller, key: IdempotencyKey = None) -> Write:
    return Write(caller, key, request_uuid(caller.requester, key))


WriteRequest = Annotated[Write, Depends(_write)]
"""The parameter of a route that changes something. It reads the caller and the header `Idempotency-Key`."""


def url_safe(secret: bytes) -> str:
    """Return `secret` in URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(secret).decode("ascii").rstrip("=")


def derived_token(keyring: Keyring, made: uuid.UUID, name: str, known_sha256: str | None = None) -> str:
    """Return the token of the principal that a request adds.

    The same request gets the same token, so the gateway need not store it. Without the master key it cannot be
    guessed.

    Args:
        keyring: The master keys.
        made: The id of the request.
        name: The name of the principal.
        known_sha256: The hash of the token that the principal already has, perhaps under an earlier master key.
    """
    purpose = f"principal-token/{name}/{made}"
    for one in keyring.each() if known_sha256 is not None else ():
        token = url_safe(one.derive(purpose))
        if token_hash(token) == known_sha256:
            return token
    return url_safe(keyring.derive(purpose))
