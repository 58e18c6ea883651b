"""The principals of the HTTP hub: their roles, the records that add and revoke them, and their fold.

The log has the SHA-256 of each token, never the token. The operator's token is not in the log: it is a file
with mode 0600. The state of the stream `principal/<name>` is one entry, `principal`, with the row.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from pydantic import AfterValidator, Field

from schemas.fold.entries import StructEntries
from schemas.fold.settled import Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import Name, WireBody
from trunkline_agent.wire.ids import PRINCIPAL
from trunkline_agent.wire.verdicts import SEQ_CONFLICT, UNKNOWN_STREAM

PRINCIPAL_ADDED: Final = "principal.added"
PRINCIPAL_REVOKED: Final = "principal.revoked"
REGISTRY_PRINCIPALS: Final = "registry_principals"

OPERATOR: Final = "operator"
DELEGATOR: Final = "delegator"
WORKER: Final = "worker"
VIEWER: Final = "viewer"
# The role of the agent of a task, by the task's token. No principal is added with this role.
AGENT: Final = "agent"
ROLES: Final = (OPERATOR, DELEGATOR, WORKER, VIEWER)
# REACTOR is the principal of derived records, SENDER the sender of the reactor's messages. HUB has a mailbox.
REACTOR: Final = "reactor"
SENDER: Final = "trunkline"
HUB: Final = "hub"
# The sender of messages that the pump itself writes, and the recipient of messages that have no other one.
SYSTEM: Final = "system"
# No other principal or agent may have these names.
RESERVED_PRINCIPALS: Final = frozenset({OPERATOR, REACTOR, SENDER, HUB, SYSTEM, "anonymous", "unverified"})

ACTIVE: Final = "active"
REVOKED: Final = "revoked"
PRINCIPAL_TRANSITIONS: Final = {ACTIVE: frozenset({REVOKED}), REVOKED: frozenset[str]()}


def _free(name: str) -> str:
    if name in RESERVED_PRINCIPALS:
        raise ValueError("a name that the programs use themselves")
    return name


FreeName = Annotated[Name, AfterValidator(_free)]
"""A name that is not in `RESERVED_PRINCIPALS`."""


class PrincipalRow(Row, frozen=True, gc=False):
    """A row of `registry_principals`: a user of the hub with a role and a token."""

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
    """Time at which the principal was revoked. Null: it is active."""


class PrincipalAddition(WireBody):
    """Body of `principal.added`: a new user of the hub, with a role and the hash of its token.

    The name must not be one of `RESERVED_PRINCIPALS`, which the programs use themselves.
    """

    TYPE: ClassVar = PRINCIPAL_ADDED
    STREAM: ClassVar = "principal/{principal}"

    principal: FreeName
    role: Literal["operator", "delegator", "worker", "viewer"]
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class PrincipalRevocation(WireBody):
    """Body of `principal.revoked`: the principal's token is no longer valid.

    The revocation is final, and the name cannot be used again.
    """

    TYPE: ClassVar = PRINCIPAL_REVOKED
    STREAM: ClassVar = "principal/{principal}"

    principal: Name


PRINCIPAL_MODELS: Final[dict[str, type[WireBody]]] = {
    PRINCIPAL_ADDED: PrincipalAddition,
    PRINCIPAL_REVOKED: PrincipalRevocation,
}


_PRINCIPAL: Final = StructEntries("principal", PrincipalRow)


def new_token() -> str:
    """Return a new bearer token for a principal or a task's agent: 256 random bits as URL-safe base64."""
    return secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """Return the SHA-256 of a bearer token in hex, the only form in which the log and the tables have it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def settle_principal(given: FoldInput) -> Outcome:
    """Settle a record of `principal/<name>`: update the stream state, return verdict and changed rows.

    A principal is added once, and its revocation is final. `schemas.streams.fold.settle` calls this function
    with a checked body. The changes of the stream state, `given.entries`, count only if the record is accepted.
    """
    known, body = _PRINCIPAL.read(given.entries), given.body
    if given.type == PRINCIPAL_ADDED:
        if known is not None:
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
        if known is None:
            return rejected(UNKNOWN_STREAM, "no principal with this name")
        if REVOKED not in PRINCIPAL_TRANSITIONS[known.status]:
            return duplicate(known.status)
        row = msgspec.structs.replace(known, status=REVOKED, revoked_at=given.now_us)
    _PRINCIPAL.write(given.entries, row)
    return accepted(row.status, (changed(row),))


PRINCIPAL_KIND: Final = StreamKind(
    name=PRINCIPAL,
    models=PRINCIPAL_MODELS,
    settle=settle_principal,
    row_of_each_stream=(PrincipalRow,),
    rows=(PrincipalRow,),
    named_by="principal",
)
