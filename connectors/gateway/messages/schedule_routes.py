"""The HTTP routes that set, remove, list and show schedules, which post messages again and again (DL-23)."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Path, Query, Request, Response

from connectors.gateway.messages.shown_messages import reserve_bytes
from connectors.gateway.rules.hub_policy import evaluate_schedule_count
from connectors.gateway.rules.message_policy import check_message
from connectors.gateway.rules.owners import owner_of_schedule, setter_of_schedule
from connectors.gateway.rules.schedule_models import (
    NEXT_RUNS_SHOWN,
    ScheduleAnswer,
    ScheduleFilter,
    ScheduleRequest,
    SchedulesAnswer,
)
from connectors.gateway.services.audit_log import why_refused
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import encoded_within, existing, json_answer, row_as_json
from connectors.gateway.web.idempotency import WriteRequest, caller_of
from connectors.gateway.web.models import NAME_PATTERN, NoFields
from connectors.gateway.web.policy import Action, Caller, needs_owner
from schemas.streams.mailboxes.message import milliseconds_of
from schemas.streams.schedule.schedule_registry import (
    ACTIVE,
    BODY_CHARACTERS_MOST,
    ScheduleRemoved,
    ScheduleRow,
    ScheduleSet,
    schedule_request_record,
)
from schemas.wire.record import JSON_CONTENT
from trunkline_agent.wire.ids import NAME_LIMIT
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import canonical

SCHEDULES: Final = "/api/hub/schedules"
SCHEDULE: Final = f"{SCHEDULES}/{{name}}"
# The document's own example would leave out both ways to name the times of the runs.
_EXAMPLE: Final = {"recipient": "echo", "type": "ask", "payload": {"text": "hello"}, "cron": "0 9 * * 1-5"}
SchedulePath = Annotated[
    str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT, description="Name of the schedule.")
]


def add_schedule_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that set, remove, list and show schedules.

    Called once, when the gateway starts. The paths begin with `/api/hub/schedules`. The routes read from `hub`
    and append records through it.
    """
    _add_changes(routes, hub)
    _add_reads(routes, hub)


def _add_changes(routes: Routes, hub: Hub) -> None:
    """Add the routes that set and remove a schedule."""

    @routes.post(
        SCHEDULE,
        Action.SCHEDULE_SET,
        ScheduleAnswer,
        owner_of_schedule(hub, is_free_own=True),
        why_refused=why_refused,
        openapi_extra={"requestBody": {"content": {JSON_CONTENT: {"example": _EXAMPLE}}}},
    )
    async def set_schedule(write: WriteRequest, name: SchedulePath, body: ScheduleRequest) -> Response:
        """Make a schedule, or replace the caller's one of this name. Its runs begin anew.

        Each run puts the message into the mailbox of the recipient, in the name of the caller, once for all
        gateways. `missed` says what happens to runs for whose time no gateway ran. With `skip`, those that are
        more than a minute late are left out. With `latest`, the newest one is posted, and with `all` each of
        them, up to 1,000 in succession.

        The answer is 404 for an unknown recipient, 403 for another principal's schedule, and 409 when the
        idempotency key was used for another content. When the caller's token ends, so do its schedules.
        """
        route = f"POST {SCHEDULE}"
        check_message(hub, write.caller, body.recipient, body.type, route)
        allowed = evaluate_schedule_count(hub.live_view.live(ScheduleRow), write.principal, name)
        if not allowed.allowed:
            raise hub.refusals.forbidden(allowed.reason, write.principal, route)
        wanted = ScheduleSet(
            name=name,
            request_id=write.request_id,
            cron=body.cron,
            every_s=body.every_s,
            recipient=body.recipient,
            kind=body.type,
            body=canonical(body.payload).decode("utf-8"),
            priority=body.priority,
            expires_in_ms=milliseconds_of(body.expires_in_s),
            missed=body.missed,
            from_task=write.caller.task_id,
            takes_over=_takes_over(write.caller, Action.SCHEDULE_SET),
        )
        settled = await hub.appender.settle_accepted(schedule_request_record(wanted, **write.origin))
        return json_answer(_shown(hub, name), verdict=settled.verdict)

    @routes.post(f"{SCHEDULE}/remove", Action.SCHEDULE_REMOVE, ScheduleAnswer, owner_of_schedule(hub))
    async def remove_schedule(
        write: WriteRequest, name: SchedulePath, body: NoFields | None = None
    ) -> Response:
        """Remove a schedule, so that it has no further runs. Messages that were posted stay.

        The answer is 404 for an unknown schedule, and 409 for one that is removed already.
        """
        wanted = ScheduleRemoved(
            name=name,
            request_id=write.request_id,
            from_task=write.caller.task_id,
            takes_over=_takes_over(write.caller, Action.SCHEDULE_REMOVE),
        )
        settled = await hub.appender.settle_accepted(schedule_request_record(wanted, **write.origin))
        return json_answer(_shown(hub, name), verdict=settled.verdict)


def _add_reads(routes: Routes, hub: Hub) -> None:
    """Add the routes that list and show schedules."""

    @routes.get(SCHEDULES, Action.SCHEDULE_LIST, SchedulesAnswer)
    async def list_schedules(request: Request, wanted: Annotated[ScheduleFilter, Query()]) -> Response:
        """List the active schedules that the caller set, sorted by name. The operator sees those of all.

        An answer has `limits.answer_bytes` at most; `left` is the number of further schedules beyond that.
        """
        caller = caller_of(request)
        is_all = not needs_owner(caller, Action.SCHEDULE_READ)
        rows = [
            row for row in hub.live_view.live(ScheduleRow) if is_all or caller.owns(setter_of_schedule(row))
        ]
        further = (row for row in rows if wanted.after is None or row.schedule > wanted.after)
        wanted_rows = sorted(further, key=lambda row: row.schedule)[: wanted.limit]
        most = hub.settings.limits.answer_bytes
        await reserve_bytes(hub, caller.principal, min(most, len(wanted_rows) * BODY_CHARACTERS_MOST))
        shown = encoded_within(map(row_as_json, wanted_rows), most)
        left = len(wanted_rows) - len(shown)
        return json_answer({"schedules": shown, "total": len(rows), "left": left})

    @routes.get(SCHEDULE, Action.SCHEDULE_READ, ScheduleAnswer, owner_of_schedule(hub))
    async def show_schedule(name: SchedulePath) -> Response:
        """Show a schedule, also a removed one, with its next five runs."""
        return json_answer(_shown(hub, name))


def _takes_over(caller: Caller, action: Action) -> Literal[True] | None:
    """Return True for a caller with a right to the schedules of all principals, None for any other."""
    return None if needs_owner(caller, action) else True


def _shown(hub: Hub, name: str) -> dict[str, Any]:
    row = existing(hub.live_view.get(ScheduleRow, name), "no schedule with this name")
    next_runs = [iso_moment(run) for run in row.next_runs(NEXT_RUNS_SHOWN)] if row.status == ACTIVE else []
    return {**row_as_json(row), "next_runs": next_runs}
