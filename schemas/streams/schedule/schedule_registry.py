"""The records about a schedule (DL-23), its row, and the rules about missed runs.

A schedule posts one message to one recipient at each of its runs. A run may be recorded later than its time,
for instance after all gateways were down.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from schemas.fold.stream_kind import Transitions
from schemas.fold.view_rows import Moment, Row
from schemas.streams.mailboxes.message import ContentType, DurationMs, MessageKind, Priority
from schemas.streams.schedule.run_times import CRON_CHARACTERS_MOST, EVERY_S_MOST, RunTimes, cron_fault
from schemas.wire.record import JSON_CONTENT
from schemas.wire.wire_body import Name, WireBody, models_of

SCHEDULE_SET: Final = "schedule.set"
SCHEDULE_REMOVED: Final = "schedule.removed"
SCHEDULE_RAN: Final = "schedule.ran"
SCHEDULE_MISSED: Final = "schedule.missed"
SCHEDULE_REFUSED: Final = "schedule.refused"
REGISTRY_SCHEDULES: Final = "registry_schedules"

ACTIVE: Final = "active"
REMOVED: Final = "removed"
SCHEDULE_TRANSITIONS: Final[Transitions] = {
    ACTIVE: frozenset({ACTIVE, REMOVED}),
    REMOVED: frozenset({ACTIVE}),
}
SKIP: Final = "skip"
LATEST: Final = "latest"
ALL: Final = "all"
GRACE_US: Final = 60_000_000
"""A run that is recorded later than this, after its time, is late."""
LATE_RUNS_MOST: Final = 1000
"""After so many late runs in succession, a schedule with the setting `all` leaves out the other late ones."""
BODY_CHARACTERS_MOST: Final = 65_536

Missed = Literal["skip", "latest", "all"]
"""The missed runs that are posted all the same: none, the latest one, or all of them."""
EverySeconds = Annotated[int, Field(ge=1, le=EVERY_S_MOST)]
"""The interval between two runs in seconds: up to 365 days."""


def _cron(text: str) -> str:
    fault = cron_fault(text)
    if fault is not None:
        raise ValueError(fault)
    return text


Cron = Annotated[str, AfterValidator(_cron), Field(json_schema_extra={"maxLength": CRON_CHARACTERS_MOST})]
"""A cron expression with five fields, which has run times."""


def check_one_timing(cron: str | None, every_s: int | None) -> None:
    """Raise ValueError unless exactly one of the two ways to name the times of the runs is given."""
    if (cron is None) == (every_s is None):
        raise ValueError("expected exactly one of cron and every_s")


class ScheduleRow(Row, frozen=True, gc=False):
    """A row of `registry_schedules`: a message that is posted again and again, and its next run."""

    VIEW: ClassVar = REGISTRY_SCHEDULES
    KEY: ClassVar = ("schedule",)

    schedule: str
    """Name of the schedule."""
    status: str
    """`active` or `removed`."""
    owner: str
    """Principal that set the schedule, and sender of its messages."""
    from_task: str | None
    """Task whose token the owner used. Null: none."""
    cron: str | None
    """Cron expression in UTC. Null: the schedule has an interval."""
    every_s: int | None
    """Seconds between two runs. Null: the schedule has a cron expression."""
    recipient: str
    """Mailbox of the realm `default` that gets the messages."""
    kind: str
    """Kind of the messages."""
    body: str
    """Body of the messages."""
    content_type: str
    """Media type of the body."""
    priority: str
    """`low`, `normal` or `high`."""
    expires_in_ms: int | None
    """Milliseconds from the posting of a message to its expiry. Null: never."""
    missed: str
    """Missed runs that are posted all the same: `skip` (none), `latest` or `all`."""
    revision: int
    """How often a schedule of this name was set."""
    set_at: Moment
    """Time at which the schedule was set."""
    next_run_at: Moment | None
    """Time of the next run. Null: there is none."""
    last_run_at: Moment | None = None
    """Time of the last run that took place. Null: none yet."""
    runs: int = 0
    """Number of runs whose messages were posted, since the schedule was set."""
    missed_runs: int = 0
    """Number of runs that were left out or whose messages were refused, since the schedule was set."""
    late_runs: int = 0
    """Number of the last runs in succession that were more than a minute late."""
    removed_at: Moment | None = None
    """Time at which the schedule was removed. Null: it is active."""
    refused_run_at: Moment | None = None
    """Time of the last run whose message the mailbox refused. Null: none."""
    refused_reason: str | None = None
    """Reason of this refusal, such as `mailbox_full`. Null: none."""

    @property
    def is_live(self) -> bool:
        """True if the schedule is active."""
        return self.status == ACTIVE

    @property
    def times(self) -> RunTimes:
        """The times of the runs."""
        return RunTimes(self.cron, self.every_s)

    def next_runs(self, most: int) -> list[int]:
        """Return the times of the next runs, at most `most`, in microseconds since 1970 UTC."""
        found, run = list[int](), self.next_run_at
        while run is not None and len(found) < most:
            found.append(run)
            run = self.times.after(run, run)
        return found

    def is_next_missed(self, now_us: int) -> bool:
        """Return whether the next run is left out, by the setting `missed`, if it is recorded at `now_us`.

        - `skip`: if it is more than a minute late.
        - `latest`: if a later run is due, too.
        - `all`: if it is more than a minute late, and the 1,000 runs before it were, too.
        """
        due = self.next_run_at
        if due is None or due > now_us:
            return False
        if self.missed == LATEST:
            following = self.times.after(due, due)
            return following is not None and following <= now_us
        is_late = now_us - due > GRACE_US
        return is_late and (self.missed == SKIP or self.late_runs >= LATE_RUNS_MOST)

    def next_after_missed(self, now_us: int) -> int | None:
        """Return the first run that is not left out, if the next one is (`is_next_missed`); `None` for none."""
        due = self.next_run_at
        if due is None:
            return None
        if self.missed == LATEST:
            return self.times.latest(due, now_us)
        return self.times.after(due, now_us - GRACE_US - 1)


class _ScheduleBody(WireBody):
    STREAM: ClassVar = "schedule/{name}"
    OMITS_NULLS: ClassVar = True

    name: Name


class ScheduleSet(_ScheduleBody):
    """Body of `schedule.set`: make a schedule, or replace the one of this name. Its runs begin anew.

    Exactly one of `cron` and `every_s` is given. Each run posts the message with the fields from `recipient` to
    `expires_in_ms`, in the name of the record's principal.

    Attributes:
        from_task: the task whose token the principal used, or `None`.
        takes_over: `True` if the principal may replace schedules of other principals, too.
    """

    TYPE: ClassVar = SCHEDULE_SET
    IDENTITY: ClassVar = ("{origin}", "{name}", "{request_id}")

    request_id: Name
    cron: Cron | None = None
    every_s: EverySeconds | None = None
    recipient: Name
    kind: MessageKind
    body: Annotated[str, Field(max_length=BODY_CHARACTERS_MOST)]
    content_type: ContentType = JSON_CONTENT
    priority: Priority = "normal"
    expires_in_ms: DurationMs | None = None
    missed: Missed = SKIP
    from_task: Name | None = None
    takes_over: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_timing(self) -> ScheduleSet:
        check_one_timing(self.cron, self.every_s)
        return self


class ScheduleRemoved(_ScheduleBody):
    """Body of `schedule.removed`: the schedule has no further runs.

    `from_task` and `takes_over` are as in `schedule.set`.
    """

    TYPE: ClassVar = SCHEDULE_REMOVED
    IDENTITY: ClassVar = ("{origin}", "{name}", "{request_id}")

    request_id: Name
    from_task: Name | None = None
    takes_over: Literal[True] | None = None


class ScheduleMissed(_ScheduleBody):
    """Body of `schedule.missed`: leave out the run at `run_at` and later ones, by the schedule's setting.

    Attributes:
        revision: the revision of the schedule.
        run_at: the time of its next run, in microseconds since 1970 UTC.
    """

    TYPE: ClassVar = SCHEDULE_MISSED

    revision: Annotated[int, Field(ge=1)]
    run_at: int


class ScheduleRefused(ScheduleMissed):
    """Body of `schedule.refused`: the mailbox refused the message of the run at `run_at`.

    Attributes:
        reason: the reason, such as `mailbox_full`.
    """

    TYPE: ClassVar = SCHEDULE_REFUSED

    reason: Name


class ScheduleRan(ScheduleMissed):
    """Body of `schedule.ran`: the run at `run_at`, with the message that it posts.

    The fields from `sender` on are those of the schedule.
    """

    TYPE: ClassVar = SCHEDULE_RAN

    sender: Name
    recipient: Name
    kind: MessageKind
    body: Annotated[str, Field(max_length=BODY_CHARACTERS_MOST)]
    content_type: ContentType
    priority: Priority
    expires_in_ms: DurationMs | None = None


SCHEDULE_MODELS: Final = models_of(ScheduleSet, ScheduleRemoved, ScheduleRan, ScheduleMissed, ScheduleRefused)


def message_fields(row: ScheduleRow) -> dict[str, Any]:
    """Return the fields of `ScheduleRan` with the message that a schedule posts."""
    return {
        "sender": row.owner,
        "recipient": row.recipient,
        "kind": row.kind,
        "body": row.body,
        "content_type": row.content_type,
        "priority": row.priority,
        "expires_in_ms": row.expires_in_ms,
    }


def next_run(row: ScheduleRow) -> dict[str, Any]:
    """Return the fields of `ScheduleMissed` with the next run of a schedule, which has one."""
    return {"name": row.schedule, "revision": row.revision, "run_at": row.next_run_at}
