"""Who may do what: roles, and the records that make and revoke the tokens of principals.

Deny by default. The operator's token is a 0600 file and no record; all others are in the log, as hashes.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from pydantic import AfterValidator, Field

from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import Moment, Row
from schemas.wire.ids import PRINCIPAL, stream_key
from schemas.wire.record import OutgoingRecord, content_id
from schemas.wire.strict_json import canonical
from schemas.wire.verdicts import SEQ_CONFLICT, UNKNOWN_STREAM
from schemas.wire.wire_body import Name, WireBody

PRINCIPAL_ADDED: Final = "principal.added"
PRINCIPAL_REVOKED: Final = "principal.revoked"
REGISTRY_PRINCIPALS: Final = "registry_principals"

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
PRINCIPAL_TRANSITIONS: Final = {ACTIVE: frozenset({REVOKED}), REVOKED: frozenset[str]()}


def _free(name: str) -> str:
    if name in RESERVED_PRINCIPALS:
        raise ValueError("a name that the programs use themselves")
    return name


class PrincipalRow(Row, frozen=True, gc=False):
    """A row of `registry_principals`; of the token only its SHA-256 (hex) is known."""

    VIEW: ClassVar = REGISTRY_PRINCIPALS
    KEY: ClassVar = ("principal",)

    principal: str
    """Name of the principal."""
    role: str
    """`operator`, `delegator`, `worker` or `viewer`."""
    status: str
    """`active` or `revoked`."""
    token_sha256: str
    """SHA-256 of the token, in hex. The token itself is not stored."""
    added_by: str
    """Principal that added this one."""
    added_at: Moment
    """Time at which the principal was added."""
    revoked_at: Moment | None
    """Time at which the principal was revoked."""


class PrincipalAddition(WireBody):
    """Body of `principal.added`. The names of RESERVED_PRINCIPALS are nobody's to have."""

    principal: Annotated[Name, AfterValidator(_free)]
    role: Literal["operator", "delegator", "worker", "viewer"]
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class PrincipalRevocation(WireBody):
    """Body of `principal.revoked`. Final: the name is not used again."""

    principal: Name


PRINCIPAL_MODELS: Final[dict[str, type[WireBody]]] = {
    PRINCIPAL_ADDED: PrincipalAddition,
    PRINCIPAL_REVOKED: PrincipalRevocation,
}


_PRINCIPAL: Final = "principal"
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(PrincipalRow).decode


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


def settle_principal(given: FoldInput) -> Outcome:
    """Settle one record of a principal's stream. A principal is added once, and its revocation is final."""
    raw, body = given.entries.get(_PRINCIPAL), given.body
    if given.type == PRINCIPAL_ADDED:
        if raw is not None:
            known = _decode(raw)
            if (known.role, known.token_sha256) == (body["role"], body["token_sha256"]):
                return duplicate(known.status)
            return rejected(SEQ_CONFLICT, "a principal with this name exists already", known.status)
        row = PrincipalRow(
            principal=given.name,
            role=body["role"],
            status=ACTIVE,
            token_sha256=body["token_sha256"],
            added_by=given.sender,
            added_at=given.now_us,
            revoked_at=None,
        )
    else:
        if raw is None:
            return rejected(UNKNOWN_STREAM, "no principal with this name")
        known = _decode(raw)
        if REVOKED not in PRINCIPAL_TRANSITIONS[known.status]:
            return duplicate(known.status)
        row = msgspec.structs.replace(known, status=REVOKED, revoked_at=given.now_us)
    given.entries.put(_PRINCIPAL, _encode(row))
    return accepted(row.status, (Change(REGISTRY_PRINCIPALS, given.name, row),))


PRINCIPAL_KIND: Final = StreamKind(
    name=PRINCIPAL,
    models=PRINCIPAL_MODELS,
    settle=settle_principal,
    row_of_each_stream=(PrincipalRow,),
    rows=(PrincipalRow,),
    named_by="principal",
)
