"""The request and answer bodies of the limits of principals (LM-01, LM-02)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from connectors.hub.serving.models import (
    LIST_LIMIT,
    NAME_PATTERN,
    WHOLE,
    AnswerBody,
    JobId,
    NamedThing,
    PageAnswer,
    QueryFilter,
    RequestBody,
    row_answer,
)
from schemas.streams.control.limits import LimitRow
from trunkline_agent.wire.strict_json import INT_MAX

_Most = Annotated[int, Field(ge=0, le=INT_MAX), WHOLE]
_PerMinute = Annotated[int, Field(ge=1, le=INT_MAX), WHOLE]

LimitAnswer = row_answer("LimitAnswer", LimitRow)
"""A row of `registry_limits`."""


class LimitsRequest(RequestBody):
    """The limits of a scope. They replace those that were set for it before. Null: not limited here."""

    pending_most: _Most | None = None
    """Largest number of messages in a mailbox that are delayed, wait or are leased."""
    bytes_most: _Most | None = None
    """Largest number of bytes of the bodies of these messages together."""
    messages_per_minute: _PerMinute | None = None
    """Messages that a principal may send in a minute, at each gateway."""
    bytes_per_minute: _PerMinute | None = None
    """Bytes in bodies of messages that a principal may send in a minute, at each gateway."""
    live_jobs_most: _Most | None = None
    """Largest number of jobs without an end that a principal has registered."""
    subscriptions_most: _Most | None = None
    """Largest number of topics that a mailbox is subscribed to."""


class LimitsFilter(QueryFilter):
    """The place at which the list of limits goes on."""

    after: Annotated[str, Field(pattern=f"^(all|role|name)/{NAME_PATTERN[1:]}")] | None = None
    """Scope and name of the last limits in the previous answer, as `name/ann`. Without it, the list
    starts at its first.
    """


class LimitsAnswer(PageAnswer):
    """Limits that were set, and the defaults."""

    limits: list[LimitAnswer]  # type: ignore[valid-type]
    """Limits, those for all first, then those of roles, then those of principals."""
    pending_default: int
    """Largest number of messages in a mailbox for which no limit was set."""
    subscriptions_default: int
    """Largest number of topics of a mailbox for which no limit was set."""


_Messages = Annotated[int, Field(ge=1, le=INT_MAX), WHOLE]
_ByAgent = Annotated[dict[NamedThing, _Messages], Field(max_length=LIST_LIMIT)]
_ByJob = Annotated[dict[JobId, _Messages], Field(max_length=LIST_LIMIT)]


class MqttLoadRequest(RequestBody):
    """The numbers of messages that arrived at the MQTT bridge since its last report.

    A report may also have the agents that do not confirm what they are sent.
    """

    agents: _ByAgent = Field(default_factory=dict)
    """Messages by the name of the agent that published them."""
    jobs: _ByJob = Field(default_factory=dict)
    """Messages by the id of the job that published them."""
    unconfirmed: _ByAgent | None = None
    """How often messages were published again without a confirmation, by the agent. Null: as before."""


class MqttLoadAnswer(AnswerBody):
    """The MQTT accounts that this request has paused."""

    agents: dict[str, int]
    """Seconds of the pause by the name of the agent."""
    jobs: dict[str, int]
    """Seconds of the pause by the id of the job."""
