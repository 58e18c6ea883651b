"""The record of a request that a door refused, in the stream `refused/<door>`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from schemas.fold.settled import rejected
from schemas.fold.stream_kind import StreamKind
from schemas.wire.wire_body import Name, Note, WireBody
from trunkline_agent.wire.ids import REFUSED

REQUEST_REFUSED: Final = "request.refused"

# Incremented when the rules of schemas/policy change, so that an auditor can tell which rules applied.
POLICY_VERSION: Final = 12
ANONYMOUS: Final = "anonymous"
RefusalReason = Literal[
    "unauthorized",
    "policy",
    "unknown_recipient",
    "malformed",
    "too_large",
    "mailbox_full",
    "rate_limited",
    "limit_reached",
]


class Refusal(WireBody):
    """Body of `request.refused`: a door refused a request.

    Attributes:
        reason: the reason, a word of `trunkline_agent.wire.verdicts`.
        why: an explanation in a few words.
        principal: the principal that made the request, or `anonymous`.
        route: the template of the HTTP route, such as `/api/jobs/{job_id}`, never the path that was sent.
        policy_version: the version of the hub's policy rules that were applied.
        suppressed: the number of similar refusals since the last such record. They were not recorded, so that a
            client cannot fill the log.
    """

    TYPE: ClassVar = REQUEST_REFUSED
    STREAM: ClassVar = "refused/{door}"

    request_id: Name
    reason: RefusalReason
    why: Note
    principal: Name = ANONYMOUS
    route: Annotated[str, Field(max_length=200)]
    policy_version: Annotated[int, Field(ge=1)] = POLICY_VERSION
    suppressed: Annotated[int, Field(ge=0)] = 0


REFUSED_KIND: Final = StreamKind(
    name=REFUSED,
    models={REQUEST_REFUSED: Refusal},
    settle=lambda given: rejected(given.body["reason"], given.body["why"]),
    row_of_each_stream=(),
)
