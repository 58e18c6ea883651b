"""Posts messages again and again, by a cron expression or an interval.

  trunkline schedules set report echo ask --cron "0 9 * * 1-5" --text "what is new?"  at nine, Monday to Friday
  trunkline schedules set tick echo tick --every 10m '{"n": 1}' --missed latest
  trunkline schedules list
  trunkline schedules show report                   all of it, with the next five runs
  trunkline schedules remove report                 no further runs; what was posted stays

A cron expression has minute, hour, day of month, month and day of week, in UTC, or is a name such as @daily.
Names (mon, jan), ranges, steps and lists are allowed. 'set' on a name of yours replaces that schedule, and its
runs begin anew. The token names the owner, who is the sender of the messages. Besides the operator, only the
owner can change the schedule. It ends with the token.

Each run posts one message, whatever the number of gateways. --missed says what happens to runs for whose time
no gateway ran. With skip, the default, those that are more than a minute late are left out. With latest, the
newest one is posted, and with all each of them, up to 1,000 in succession.

Exit codes: 0; 2 wrong arguments; 3 no such recipient or schedule; 4 refused, with the reason; 5 the gateway
does not answer.
"""

from __future__ import annotations

from typing import Any, Final

from connectors.cli.messages.message_arguments import EXPIRES, PAYLOAD, PRIORITY, payload_of
from connectors.cli.shared.actions import Actions, argument, one_of
from connectors.cli.shared.arguments import name_of, request_id, whole_seconds
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.declared import Shown, add_declared
from connectors.cli.shared.text_output import aligned, fields
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import UNIT_S

# Written out, because the module of the schedules is slow to import and help must be quick.
_MISSED: Final = ("skip", "latest", "all")
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("name", "the schedule", type=name_of("a schedule")),
    argument("recipient", "an agent, a principal, operator, or hub"),
    *PAYLOAD,
    one_of(
        argument("--cron", 'minute, hour, day of month, month, day of week in UTC, e.g. "*/5 * * * *"'),
        argument(
            "--every", "the time between two runs, e.g. 10m; at most 365d", type=whole_seconds, metavar="TIME"
        ),
        required=True,
    ),
    argument("--missed", "missed runs to post: skip (none, the default), latest or all", choices=_MISSED),
    PRIORITY,
    EXPIRES,
    request_id("the same request, and does not begin the runs anew"),
    example='trunkline schedules set report echo ask --cron "0 9 * * 1-5" --text "what is new?"',
    late="payload",
)
def _set(call: Call) -> int:
    """Make a schedule, or replace one of yours; show its next runs."""
    given = {
        "recipient": call.recipient,
        "type": call.type,
        "payload": payload_of(call),
        "cron": call.cron,
        "every_s": call.every,
        "missed": call.missed,
        "priority": call.priority,
        "expires_in_s": call.expires_in,
    }
    row = call.post_named("schedules", call.name, possible_effect="the schedule was set", **given)
    text = f"schedule {escaped(row['schedule'])} posts to {escaped(row['recipient'])}, {_timing(row)}"
    return call.print_answer(row, text, *_next_runs(row))


_COLUMNS: Final[Columns] = {
    "SCHEDULE": "schedule",
    "RUNS AT": lambda row: _timing(row),
    "TO": "recipient",
    "TYPE": "kind",
    "OWNER": "owner",
    "NEXT RUN (UTC)": lambda row: _short(row["next_run_at"]),
    "LAST RUN (UTC)": lambda row: _short(row["last_run_at"]),
    "RUNS": "runs",
    "MISSED": "missed_runs",
}


def _shown(row: Row) -> list[str]:
    columns = {name: value for name, value in row.items() if name != "next_runs"}
    return [fields(columns), *_next_runs(row)]


def _timing(row: Row) -> str:
    """Return when a schedule runs: its cron expression, or its interval in the largest whole unit."""
    if row["every_s"] is None:
        return escaped(row["cron"])
    seconds: int = row["every_s"]
    unit = next(one for one in ("d", "h", "m", "s") if seconds % UNIT_S[one] == 0)
    return f"every {seconds // UNIT_S[unit]}{unit}"


def _short(moment: Any) -> str | None:
    """Return a time without its fraction of a second, which is zero; None for None."""
    return None if moment is None else escaped(str(moment)).replace(".000Z", "Z")


def _next_runs(row: Row) -> list[str]:
    """Return a table of the next runs; nothing without one."""
    runs = [[_short(run)] for run in row["next_runs"]]
    return ["", aligned(["NEXT RUNS (UTC)"], runs)] if runs else []


add_declared(
    ACTIONS,
    "schedules",
    Shown("list", columns=_COLUMNS),
    Shown("show", answer=_shown),
    Shown("remove", answer="schedule {schedule} is removed after {runs} runs"),
)
