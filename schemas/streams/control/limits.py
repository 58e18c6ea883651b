"""The stream `control/limits`: limits for all principals, for those of a role, or for one (LM-02).

A limit of one principal counts before that of its role, and this before that for all. The fold only stores
them, and the gateways apply them. The limits of a mailbox's own are in the stream of the mailbox.

Entries:
`request/<scope>/<name>`: the digest of the newest request about this scope, with its id.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgspec
from pydantic import Field, model_validator

from schemas.fold.entries import StructEntries
from schemas.fold.memories import content_digest
from schemas.fold.settled import Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import Most, Name, WireBody, models_of
from trunkline_agent.wire.ids import CONTROL, stream_key
from trunkline_agent.wire.strict_json import INT_MAX
from trunkline_agent.wire.verdicts import SEQ_CONFLICT

LIMITS: Final = "limits"
LIMITS_STREAM: Final = stream_key(CONTROL, LIMITS)
CONTROL_LIMITED: Final = "control.limited"
REGISTRY_LIMITS: Final = "registry_limits"
ENTRY_VERSION: Final = 1

ALL: Final = "all"
ROLE: Final = "role"
NAME: Final = "name"
Scope = Literal["all", "role", "name"]
# The limit of a principal for which no other was set. A subscription is in the memory of each gateway.
SUBSCRIPTIONS_DEFAULT: Final = 1000
PerMinute = Annotated[int, Field(ge=1, le=INT_MAX)]


class LimitsSet(WireBody):
    """Body of `control.limited`: these limits replace those that were set for the scope before.

    `name` is the role or the principal, and `all` for the scope `all`. `None` means that the scope has no such
    limit.

    Attributes:
        pending_most: the largest number of messages without a final status in the mailbox of a principal.
        bytes_most: the largest number of bytes of their bodies.
        messages_per_minute: how many messages a principal may send in a minute, at each gateway.
        bytes_per_minute: how many bytes in bodies of messages it may send in a minute, at each gateway.
        live_jobs_most: how many jobs that it registered may be without an end.
        subscriptions_most: how many topics its mailbox may be subscribed to.
    """

    TYPE: ClassVar = CONTROL_LIMITED
    STREAM: ClassVar = LIMITS_STREAM
    IDENTITY: ClassVar = ("{origin}", "{scope}", "{name}", "{request_id}")
    OMITS_NULLS: ClassVar = True

    scope: Scope
    name: Name
    request_id: Name
    pending_most: Most | None = None
    bytes_most: Most | None = None
    messages_per_minute: PerMinute | None = None
    bytes_per_minute: PerMinute | None = None
    live_jobs_most: Most | None = None
    subscriptions_most: Most | None = None

    @model_validator(mode="after")
    def _name_fits(self) -> Self:
        if self.scope == ALL and self.name != ALL:
            raise ValueError("the scope all has the name all")
        return self


class LimitRow(Row, frozen=True, gc=False):
    """A row of `registry_limits`: the limits of all principals, of a role, or of one principal."""

    VIEW: ClassVar = REGISTRY_LIMITS
    KEY: ClassVar = ("scope", "name")

    scope: str
    """`all`, `role` or `name`."""
    name: str
    """Role or principal; `all` for the scope `all`."""
    pending_most: int | None
    """Largest number of messages without a final status in a mailbox. Null: not limited here."""
    bytes_most: int | None
    """Largest number of bytes of the bodies of these messages. Null: not limited here."""
    messages_per_minute: int | None
    """Messages that a principal may send in a minute at each gateway. Null: not limited here."""
    bytes_per_minute: int | None
    """Bytes of bodies that a principal may send in a minute at each gateway. Null: not limited here."""
    limited_by: str
    """Principal that set the limits, as `<door>/<principal>`."""
    limited_at: Moment
    """Time at which the limits were set."""
    live_jobs_most: int | None = None
    """Jobs without an end that a principal may have registered. Null: not limited here."""
    subscriptions_most: int | None = None
    """Topics that a mailbox may be subscribed to. Null: not limited here."""


class _Request(msgspec.Struct, array_like=True, frozen=True, gc=False):
    version: int
    request_id: str
    digest: bytes


_REQUESTS: Final = StructEntries("request/", _Request)
LIMIT_MODELS: Final = models_of(LimitsSet)


def settle_limits(given: FoldInput) -> Outcome:
    """Settle a record of `control/limits`: return verdict and changed row.

    `settle_control` has checked its body. The newest request about a scope is recognised when it is repeated.
    """
    body = given.body
    at, digest = f"{body['scope']}/{body['name']}", content_digest(body)
    known = _REQUESTS.read(given.entries, at)
    if known is not None and known.request_id == body["request_id"]:
        if known.digest == digest:
            return duplicate(None)
        return rejected(SEQ_CONFLICT, "this request id was used with other content")
    _REQUESTS.write(given.entries, _Request(ENTRY_VERSION, body["request_id"], digest), at)
    limits: dict[str, Any] = {
        name: body.get(name) for name in LimitsSet.model_fields if name in LimitRow.__struct_fields__
    }
    return accepted(None, (changed(LimitRow(**limits, limited_by=given.sender, limited_at=given.now_us)),))
