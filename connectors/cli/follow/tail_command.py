"""Shows settled records, newest last, and follows the ledger as rows are added.

  trunkline tail                              the newest 10 rows, then each new one
  trunkline tail --job 0a1b2c3d --no-follow   the rows of one job, and end
  trunkline tail --verdict rejected --json | jq .reason
  trunkline tail --live                       from the gateway instead of the ledger: within milliseconds

Exit codes: 0; 3 with --no-follow when there is no such row; 130 after Ctrl-C. --json leaves out `entries` and
`value_sealed`, which only refold and replay open.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from connectors.cli.shared.actions import argument, flag, one_of
from connectors.cli.shared.arguments import job_id, stream_key
from connectors.cli.shared.call import Call
from connectors.cli.shared.text_output import Notes, refuse_without_reader
from connectors.log.ledger_files.ledger_export import (
    JSON_COLUMNS,
    LINE_COLUMNS,
    LINE_HEADING,
    json_line,
    text_line,
)
from schemas.streams.fold import RECORD_TYPES
from trunkline_agent.errors import UsageError
from trunkline_agent.terminal_text import is_coloured
from trunkline_agent.wire.ids import JOB
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REASONS, REJECTED

if TYPE_CHECKING:
    from connectors.log.ledger_files.ledger_reader import LedgerPart

_NOTHING_FOUND = 3
_LOOK_S = 1.0
_NOTES = Notes("tail")


def _job_stream(text: str) -> tuple[str, str]:
    return JOB, job_id(text)


ARGUMENTS = (
    one_of(
        argument(
            "--job", "only this job: 8 lower-case hex digits", type=_job_stream, dest="stream", metavar="ID"
        ),
        argument("--stream", "only this stream, e.g. refused/mqtt", type=stream_key, metavar="KIND/ID"),
    ),
    argument("--verdict", "only this verdict", choices=(ACCEPTED, DUPLICATE, REJECTED)),
    argument("--reason", "only this reason of a rejection", choices=REASONS, metavar="R"),
    argument("--door", "only records that came by this door, e.g. mqtt", metavar="D"),
    argument("--type", "only this type, e.g. job.event", choices=RECORD_TYPES, metavar="T"),
    argument("-n", "newest rows to begin with (default: 10)", type=int, default=10, metavar="ROWS"),
    flag("--no-follow", "end after them"),
    flag(
        "--live",
        "follow the gateway: records that are settled from now on, in milliseconds; without -n, and only "
        "jobs and sessions unless you are the operator",
    ),
    flag("--json", "one JSON object a line"),
)


def run(call: Call) -> int:
    """Run `trunkline tail`: print rows of the ledger, or of the gateway with `--live`, until Ctrl-C.

    With `--no-follow` it prints the existing rows and returns the exit code: 0, or 3 if there are none. Raises
    UsageError for wrong arguments, and TrunklineError if ledger or gateway cannot be read.
    """
    if call.live:
        if call.no_follow:
            raise UsageError("--live shows only new records; without it, --no-follow shows the existing ones")
        return _follow_live(call)
    # Imported here, because Arrow is slow to import and help must be quick.
    from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader

    if call.n < 0:
        raise UsageError("-n: expected a number of rows, 0 or more")
    kind, name = call.stream or (None, None)
    wanted = {field: getattr(call, field) for field in ("verdict", "reason", "door", "type")}
    where = LedgerFilter(stream_kind=kind, stream_id=name, **wanted)
    columns = JSON_COLUMNS if call.json else LINE_COLUMNS
    reader = LedgerReader(call.settings)
    if call.no_follow or reader.exists():
        newest = reader.newest_rows(call.n, where, columns)
    else:
        print(f"waiting for the ledger at {reader.path} (trunkline up starts the stack)", file=sys.stderr)
        newest = None
    if not call.json and (newest is None or newest.rows.num_rows or not call.no_follow):
        print(LINE_HEADING, flush=True)
    if newest is not None:
        _print(newest, call.json)
    if call.no_follow:
        if newest is not None and newest.rows.num_rows:
            return 0
        _NOTES.say("there is no such row in the ledger")
        return _NOTHING_FOUND
    after = -1 if newest is None else newest.version
    for part in reader.follow(after, where, columns, stop=_go_on):
        _print(part, call.json)
    return 0


def _go_on() -> bool:
    refuse_without_reader()
    return False


def _print(part: LedgerPart, as_json: bool) -> None:
    coloured = is_coloured()
    for row in part.rows.to_pylist():
        print(json_line(row) if as_json else text_line(row, coloured=coloured))
    sys.stdout.flush()


def _follow_live(call: Call) -> NoReturn:
    """Print records that the gateway settles, until interrupted. Raises TrunklineError."""
    from connectors.plumbing.gateway_client.event_stream import GAP, SETTLED, SNAPSHOT, EventStream
    from connectors.plumbing.gateway_client.gateway_client import path_of, reachable

    stream_name = None if call.stream is None else "/".join(call.stream)
    parameters = {"stream": stream_name, "type": call.type, "verdict": call.verdict}
    with (
        reachable(call.settings) as gateway,
        EventStream(gateway, path_of("events"), parameters, lost=_NOTES.lost("gateway")) as stream,
    ):
        heading = not call.json
        while True:
            event = stream.next(_LOOK_S)
            refuse_without_reader()
            if event is None:
                continue
            if event.name == SNAPSHOT and heading:
                print(LINE_HEADING, flush=True)
                heading = False
            elif event.name == GAP:
                _NOTES.say("records were missed; the ledger has them: trunkline tail")
            elif event.name == SETTLED and _fits(call, event.data):
                data = event.data
                print(json.dumps(data, separators=(",", ":")) if call.json else _live_line(data), flush=True)


def _fits(call: Call, data: dict[str, Any]) -> bool:
    """Apply the filters that the gateway does not apply itself."""
    door = (data["principal"] or "").partition("/")[0]
    return call.reason in (None, data["reason"]) and call.door in (None, door)


def _live_line(data: dict[str, Any]) -> str:
    kind, _, name = data["stream"].partition("/")
    body = data["body"]
    row = {
        "logged_at": datetime.fromisoformat(data["logged_at"]),
        "stream_kind": kind,
        "stream_id": name,
        "masked": None,
        "value": None if body is None else json.dumps(body).encode("ascii"),
        **{field: data[field] for field in ("seq", "type", "verdict", "reason", "why", "late")},
    }
    return text_line(row, coloured=is_coloured())
