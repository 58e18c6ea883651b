"""The limits of principals and mailboxes (LM-01, LM-02) and the MQTT load (LM-10): bodies and operations."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Path
from pydantic import Field

from connectors.hub.engine.family import Family, LongAnswer, Steps, page_by_name
from connectors.hub.engine.operation import Asked
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import malformed, row_as_json
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
from connectors.hub.serving.policy import RIGHTS, Action
from connectors.operations.principals.principal_operations import NamePath
from schemas.streams.control.limits import (
    ALL,
    NAME,
    ROLE,
    SUBSCRIPTIONS_DEFAULT,
    LimitRow,
    LimitsSet,
)
from schemas.streams.mailboxes.mailbox_bodies import PENDING_DEFAULT, MailboxLimits
from trunkline_agent.wire.agent_message import mqtt_user
from trunkline_agent.wire.strict_json import INT_MAX
from trunkline_agent.wire.verdicts import RATE_LIMITED

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


LIMITS: Final = Family("/api/hub")
_ORDER: Final = (ALL, ROLE, NAME)
ScopePath = Annotated[Literal["all", "role", "name"], Path(description="Whom the limits are for.")]


@LIMITS.post("/mqtt-load", Action.LIMITS_SET, MqttLoadAnswer, KEY=None)
def report_mqtt_load(hub: Hub, asked: Asked, body: MqttLoadRequest) -> dict[str, Any]:
    """Report how many messages each account has published at the stack's own MQTT broker.

    The MQTT bridge sends this. An account that has published far more than its messages of a minute is
    paused: the broker refuses what it publishes, at first for 60 seconds, and at each repetition for twice
    as long, up to 960 seconds. The answer lists the accounts that this request has paused. A report that is
    repeated counts again. A gateway that keeps no accounts at the broker pauses none.

    `unconfirmed` replaces the list of agents that do not confirm what the bridge publishes on their inbox.
    """
    if body.unconfirmed is not None:
        hub.unconfirmed_inboxes = body.unconfirmed
    agents = {name: _paused(hub, name, mqtt_user(name), count) for name, count in body.agents.items()}
    jobs = {job_id: _paused(hub, job_id, job_id, count) for job_id, count in body.jobs.items()}
    return {"agents": _known(agents), "jobs": _known(jobs)}


@LIMITS.get("/limits", Action.LIMITS_READ, LimitsAnswer, COMMAND="principals limits")
def list_limits(hub: Hub, asked: Asked, wanted: LimitsFilter) -> LongAnswer:
    """List the limits that were set: for all principals, for roles, and for single principals.

    A limit of a principal counts before that of its role, and this before that for all. An answer has
    `limits.answer_bytes` at most.
    """
    rows = hub.live_view.live(LimitRow)
    if wanted.after is not None:
        wanted = wanted.model_copy(update={"after": _place(*wanted.after.split("/"))})
    return page_by_name(
        hub,
        "limits",
        rows,
        lambda row: _place(row.scope, row.name),
        wanted,
        pending_default=PENDING_DEFAULT,
        subscriptions_default=SUBSCRIPTIONS_DEFAULT,
    )


@LIMITS.post("/limits/{scope}/{name}", Action.LIMITS_SET, LimitAnswer)
def set_limits(hub: Hub, asked: Asked, scope: ScopePath, name: NamePath, body: LimitsRequest) -> Steps:
    """Set the limits of all principals (`all/all`), of a role, or of one principal and its mailbox.

    They replace those that were set before, and count at once. The mailbox's own limits are counted by the
    log, whatever the number of gateways. Each gateway counts the rates of a minute, the jobs and the
    subscriptions for itself.
    """
    if scope == ALL and name != ALL:
        raise malformed("the limits for all have the name all")
    if scope == ROLE and name not in RIGHTS:
        raise malformed(f"there is no such role; the roles are {', '.join(sorted(RIGHTS))}")
    wanted = LimitsSet(scope=scope, name=name, request_id=asked.request_id, **dict(body))
    if scope == NAME:
        own = MailboxLimits(
            to=name,
            request_id=asked.request_id,
            pending_most=body.pending_most,
            bytes_most=body.bytes_most,
        )
        yield own.record(**asked.origin)
    yield wanted.record(**asked.origin)
    row = hub.live_view.get(LimitRow, f"{scope}/{name}")
    return None if row is None else row_as_json(row)


def _place(scope: str, name: str) -> str:
    """Return the place of limits in their list: those for all are first, then those of roles."""
    return f"{_ORDER.index(scope)}/{name}"


def _paused(hub: Hub, name: str, owner: str, messages: int) -> int | None:
    """Count messages, and pause their account if they are far too many. Return its seconds, or None."""
    per_minute = hub.limits.of(name).messages_per_minute
    if hub.settings.mqtt.accounts_dir is None:
        return None
    seconds = hub.publish_pauses.report(owner, messages, per_minute)
    if seconds is not None:
        why = f"published far more than {per_minute} messages a minute over MQTT; paused there for {seconds} s"
        hub.refusals.record(RATE_LIMITED, why, name, "MQTT")
        hub.pause_publishing(owner, seconds)
    return seconds


def _known(seconds: dict[str, int | None]) -> dict[str, int]:
    return {name: found for name, found in seconds.items() if found is not None}
