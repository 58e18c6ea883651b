"""The operations of schedules (DL-23), which post messages again and again, and their bodies."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from fastapi import Path
from pydantic import AfterValidator, AwareDatetime, Field, create_model, model_validator

from connectors.hub.engine.family import Family, LongAnswer, page_by_name
from connectors.hub.engine.operation import Asked, Call, Value
from connectors.hub.services.audit_log import why_refused
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import existing, row_as_json
from connectors.hub.serving.models import (
    NAMED,
    WHOLE,
    AnswerBody,
    ListLimit,
    NamedThing,
    NoFields,
    PageFilter,
    RequestBody,
    row_answer,
)
from connectors.hub.serving.policy import Action, Caller, needs_owner
from connectors.operations.rules.hub_policy import check_message, evaluate_schedule_count
from connectors.operations.rules.message_models import MessageKind
from connectors.operations.rules.owners import free_schedule_or_own, owner_of_schedule, setter_of_schedule
from schemas.streams.mailboxes.message import DurationSeconds, Priority, milliseconds_of
from schemas.streams.schedule.schedule_registry import (
    ACTIVE,
    BODY_CHARACTERS_MOST,
    SKIP,
    Cron,
    EverySeconds,
    Missed,
    ScheduleRemoved,
    ScheduleRow,
    ScheduleSet,
    check_one_timing,
)
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import canonical

NEXT_RUNS_SHOWN: Final = 5


def _payload_within_limit(payload: Any) -> Any:
    characters = len(canonical(payload).decode("utf-8"))
    if characters > BODY_CHARACTERS_MOST:
        raise ValueError(f"has {characters} characters as text, and may have {BODY_CHARACTERS_MOST}")
    return payload


class ScheduleRequest(RequestBody):
    """The message that a schedule posts, and the times of its runs: exactly one of `cron` and `every_s`."""

    recipient: NamedThing
    """Name of the mailbox that gets the messages."""
    type: MessageKind
    """Kind of the messages, a word that the sender chooses."""
    payload: Annotated[Any, AfterValidator(_payload_within_limit)] = Field({})
    """Content of the messages: any JSON, at most 65,536 characters as text."""
    cron: Cron | None = None
    """Minute, hour, day of month, month and day of week of the runs, in UTC. Null: they have an interval."""
    every_s: Annotated[EverySeconds, WHOLE] | None = None
    """Time between two runs, in seconds. Null: they have a cron expression."""
    missed: Missed = SKIP
    """Runs to post although no gateway ran at their time: none, the latest, or all of them."""
    priority: Priority = "normal"
    """Messages of a higher priority are handed out first."""
    expires_in_s: DurationSeconds | None = None
    """Time until each message expires, in seconds. Null: never."""

    @model_validator(mode="after")
    def _one_timing(self) -> Self:
        check_one_timing(self.cron, self.every_s)
        return self


class ScheduleFilter(PageFilter):
    """The schedules to list."""

    limit: ListLimit = 100
    """Largest number of schedules in the answer."""


ScheduleAnswer: Final = create_model(
    "ScheduleAnswer",
    __base__=row_answer("ScheduleAnswer", ScheduleRow),
    __doc__="A schedule, and its next five runs.",
    next_runs=(list[AwareDatetime], Field(description="Times of the next five runs.")),
)


class SchedulesAnswer(AnswerBody):
    """Active schedules, and how many there are."""

    schedules: list[row_answer("ListedSchedule", ScheduleRow)]  # type: ignore[valid-type]
    """Schedules, sorted by name."""
    total: int
    """Number of all schedules that the caller may see."""
    left: int
    """Number of schedules that were asked for and are not in the answer, because it would be too long."""


# The document's own example would leave out both ways to name the times of the runs.
_EXAMPLE: Final = {"recipient": "echo", "type": "ask", "payload": {"text": "hello"}, "cron": "0 9 * * 1-5"}
SchedulePath = Annotated[str, Path(**NAMED, description="Name of the schedule.")]


def _shown(hub: Hub, name: str) -> dict[str, Any]:
    row = existing(hub.live_view.get(ScheduleRow, name), "no schedule with this name")
    next_runs = [iso_moment(run) for run in row.next_runs(NEXT_RUNS_SHOWN)] if row.status == ACTIVE else []
    return {**row_as_json(row), "next_runs": next_runs}


_VALUE: Final = Value(
    "Schedule",
    "A message that the hub sends again and again.",
    ("schedule", "recipient", "kind", "cron", "every_s", "status", "next_run_at", "runs"),
    {"schedule": "name", "kind": "type"},
)
SCHEDULES: Final = Family("/api/hub/schedules", _shown, owner=owner_of_schedule)


@SCHEDULES.post(
    "/{name}",
    Action.SCHEDULE_SET,
    ScheduleAnswer,
    owner=free_schedule_or_own,
    why_refused=staticmethod(why_refused),
    EXAMPLE=_EXAMPLE,
)
def set_schedule(hub: Hub, asked: Asked, name: SchedulePath, body: ScheduleRequest) -> ScheduleSet:
    """Make a schedule, or replace the caller's one of this name. Its runs begin anew.

    Each run puts the message into the mailbox of the recipient, in the name of the caller, once for all
    gateways. `missed` says what happens to runs for whose time no gateway ran. With `skip`, those that are
    more than a minute late are left out. With `latest`, the newest one is posted, and with `all` each of
    them, up to 1,000 in succession.

    The answer is 404 for an unknown recipient, 403 for another principal's schedule, and 409 when the
    idempotency key was used for another content. When the caller's token ends, so do its schedules.
    """
    route = f"POST {SCHEDULES.path}/{{name}}"
    check_message(hub, asked.caller, body.recipient, body.type, route)
    allowed = evaluate_schedule_count(hub.live_view.live(ScheduleRow), asked.principal, name)
    if not allowed.allowed:
        raise hub.refusals.forbidden(allowed.reason, asked.principal, route)
    return ScheduleSet(
        name=name,
        request_id=asked.request_id,
        cron=body.cron,
        every_s=body.every_s,
        recipient=body.recipient,
        kind=body.type,
        body=canonical(body.payload).decode("utf-8"),
        priority=body.priority,
        expires_in_ms=milliseconds_of(body.expires_in_s),
        missed=body.missed,
        from_task=asked.caller.task_id,
        takes_over=_takes_over(asked.caller, Action.SCHEDULE_SET),
    )


@SCHEDULES.post(
    "/{name}/remove",
    Action.SCHEDULE_REMOVE,
    ScheduleAnswer,
    COMMAND="schedules remove",
    CALL=Call("unschedule", _VALUE),
)
def remove_schedule(
    hub: Hub, asked: Asked, name: SchedulePath, body: NoFields | None = None
) -> ScheduleRemoved:
    """Remove a schedule, so that it has no further runs. Messages that were posted stay.

    The answer is 404 for an unknown schedule, and 409 for one that is removed already.
    """
    return ScheduleRemoved(
        name=name,
        request_id=asked.request_id,
        from_task=asked.caller.task_id,
        takes_over=_takes_over(asked.caller, Action.SCHEDULE_REMOVE),
    )


@SCHEDULES.get(
    "", Action.SCHEDULE_LIST, SchedulesAnswer, COMMAND="schedules list", CALL=Call("schedules", _VALUE)
)
def list_schedules(hub: Hub, asked: Asked, wanted: ScheduleFilter) -> LongAnswer:
    """List the active schedules that the caller set, sorted by name. The operator sees those of all.

    An answer has `limits.answer_bytes` at most; `left` is the number of further schedules beyond that.
    """
    is_all = not needs_owner(asked.caller, Action.SCHEDULE_READ)
    active = hub.live_view.live(ScheduleRow)
    rows = [row for row in active if is_all or asked.caller.owns(setter_of_schedule(row))]
    most: dict[str, Any] = {"row_bytes": BODY_CHARACTERS_MOST, "total": len(rows)}
    return page_by_name(hub, "schedules", rows, lambda row: row.schedule, wanted, **most)


@SCHEDULES.get("/{name}", Action.SCHEDULE_READ, ScheduleAnswer, COMMAND="schedules show")
def show_schedule(hub: Hub, asked: Asked, name: SchedulePath) -> dict[str, Any]:
    """Show a schedule, also a removed one, with its next five runs."""
    return _shown(hub, name)


def _takes_over(caller: Caller, action: Action) -> Literal[True] | None:
    """Return True for a caller with a right to the schedules of all principals, None for any other."""
    return None if needs_owner(caller, action) else True
