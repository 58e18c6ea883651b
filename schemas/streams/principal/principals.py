"""Who may do what: roles, and the records that make and revoke the tokens of principals.

Deny by default. The operator's token is a 0600 file and no record; all others are in the log, as hashes.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from schemas.wire.ids import PRINCIPAL, stream_key
from schemas.wire.record import PRINCIPAL_ADDED, PRINCIPAL_REVOKED, OutgoingRecord, content_id
from schemas.wire.strict_json import canonical
from schemas.wire.wire_body import Name, WireBody

OPERATOR: Final = "operator"
DELEGATOR: Final = "delegator"
WORKER: Final = "worker"
VIEWER: Final = "viewer"
# Whoever has the token of a task; no principal is added with this role.
AGENT: Final = "agent"
ROLES: Final = (OPERATOR, DELEGATOR, WORKER, VIEWER)
# The reactor signs its follow-ups with this name, and sends messages by the other; the hub has a mailbox.
REACTOR: Final = "reactor"
SENDER: Final = "trunkline"
HUB: Final = "hub"
# The pump signs by this name what no listener says, and what is bound for nobody goes there.
SYSTEM: Final = "system"
# Nobody else may have these names.
RESERVED_PRINCIPALS: Final = frozenset({OPERATOR, REACTOR, SENDER, HUB, SYSTEM, "anonymous", "unverified"})

ACTIVE: Final = "active"
REVOKED: Final = "revoked"


def _free(name: str) -> str:
    if name in RESERVED_PRINCIPALS:
        raise ValueError("a name that the programs use themselves")
    return name


class PrincipalAddition(WireBody):
    """Body of `principal.added`. The names of RESERVED_PRINCIPALS are nobody's to have."""

    principal: Annotated[Name, AfterValidator(_free)]
    role: Literal["operator", "delegator", "worker", "viewer"]
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class PrincipalRevocation(WireBody):
    """Body of `principal.revoked`. Final: the name is not used again."""

    principal: Name


def new_token() -> str:
    """A fresh bearer token, 256 random bits."""
    return secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """What is stored of a token: its SHA-256 in hex."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def addition_record(
    name: str, role: str, token: str, *, door: str = "http", principal: str = OPERATOR
) -> OutgoingRecord:
    """The record that adds a principal. Raises pydantic.ValidationError for a bad name or role."""
    body = PrincipalAddition.model_validate(
        {"principal": name, "role": role, "token_sha256": token_hash(token)}
    )
    return _record(PRINCIPAL_ADDED, body, door, principal)


def revocation_record(name: str, *, door: str = "http", principal: str = OPERATOR) -> OutgoingRecord:
    """The record that revokes a principal's token. Raises pydantic.ValidationError for a bad name."""
    return _record(PRINCIPAL_REVOKED, PrincipalRevocation(principal=name), door, principal)


def _record(
    kind: str, body: PrincipalAddition | PrincipalRevocation, door: str, principal: str
) -> OutgoingRecord:
    value = canonical(body.model_dump(mode="json"))
    return OutgoingRecord(
        stream=stream_key(PRINCIPAL, body.principal),
        ce_id=content_id(kind.encode(), value),
        door=door,
        principal=principal,
        type=kind,
        value=value,
    )
