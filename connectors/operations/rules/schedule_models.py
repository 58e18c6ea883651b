"""The request and answer bodies of schedules, which post messages again and again (DL-23)."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, AwareDatetime, Field, create_model, model_validator

from connectors.hub.serving.models import (
    WHOLE,
    AnswerBody,
    ListLimit,
    NamedThing,
    PageFilter,
    RequestBody,
    row_answer,
)
from connectors.operations.rules.message_models import MessageKind
from schemas.streams.mailboxes.message import DurationSeconds, Priority
from schemas.streams.schedule.schedule_registry import (
    BODY_CHARACTERS_MOST,
    SKIP,
    Cron,
    EverySeconds,
    Missed,
    ScheduleRow,
    check_one_timing,
)
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
