"""Shows what was settled, newest last, and follows the ledger as rows land.

  trunkline tail                              the newest 10 rows, then each new one
  trunkline tail --job 0a1b2c3d --no-follow   what became of one job, and end
  trunkline tail --verdict rejected --json | jq .reason
  trunkline tail --live                       from the gateway instead of the ledger: within milliseconds

Exit codes: 0; 3 with --no-follow when there is no such row; 130 after Ctrl-C. --json leaves out what only
refold and replay open: `entries` and `value_sealed`.
"""

from __future__ import annotations

import argparse
import select
import sys
from typing import TYPE_CHECKING

from connectors.ledger_files.ledger_lines import JSON_COLUMNS, LINE_COLUMNS, LINE_HEADING, json_line, text_line
from connectors.terminal.terminal_text import is_coloured
from schemas.errors import UsageError
from schemas.wire.ids import JOB, is_job_id, parse_stream_key
from schemas.wire.record import RECORD_TYPES
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, REASONS, REJECTED

if TYPE_CHECKING:
    from connectors.ledger_files.ledger_reader import LedgerFilter, LedgerPart
    from schemas.settings.settings import Settings

_NOTHING_FOUND = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--job", metavar="ID", help="only this job: 8 lower-case hex digits")
    of.add_argument("--stream", metavar="KIND/ID", help="only this stream, e.g. refused/mqtt")
    parser.add_argument("--verdict", choices=(ACCEPTED, DUPLICATE, REJECTED), help="only this verdict")
    parser.add_argument("--reason", choices=REASONS, metavar="R", help="only this reason of a rejection")
    parser.add_argument("--door", metavar="D", help="only what came by this door, e.g. mqtt")
    parser.add_argument("--type", choices=RECORD_TYPES, metavar="T", help="only this type, e.g. job.event")
    parser.add_argument(
        "-n", type=int, default=10, metavar="ROWS", help="newest rows to begin with (default: 10)"
    )
    parser.add_argument("--no-follow", action="store_true", help="end after them")
    parser.add_argument(
        "--live",
        action="store_true",
        help="follow the gateway: what is settled from now on, in milliseconds; without -n, and with jobs and "
        "sessions alone for all but the operator",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print rows until told to end; returns the exit code. Raises NotFound, UsageError, TrunklineError."""
    if args.live:
        return _run_live(args, settings)
    # Imported here, because Arrow is slow to import and help must be quick.
    from connectors.ledger_files.ledger_reader import LedgerReader

    if args.n < 0:
        raise UsageError("-n: expected a number of rows, 0 or more")
    where = _filter(args)
    columns = JSON_COLUMNS if args.json else LINE_COLUMNS
    reader = LedgerReader(settings)
    if args.no_follow or reader.exists():
        newest = reader.newest_rows(args.n, where, columns)
    else:
        print(f"waiting for the ledger at {reader.path} (trunkline up starts the stack)", file=sys.stderr)
        newest = None
    if not args.json and (newest is None or newest.rows.num_rows or not args.no_follow):
        print(LINE_HEADING, flush=True)
    if newest is not None:
        _print(newest, args.json)
    if args.no_follow:
        return 0 if newest is not None and newest.rows.num_rows else _nothing()
    after = -1 if newest is None else newest.version
    for part in reader.follow(after, where, columns, stop=_refuse_without_reader):
        _print(part, args.json)
    return 0


def _run_live(args: argparse.Namespace, settings: Settings) -> int:
    from connectors.cli.follow.tail_live import LiveFilter, follow_live

    if args.no_follow:
        raise UsageError("--live shows what comes from now on; without it, --no-follow shows what is there")
    stream = f"{JOB}/{args.job}" if args.job is not None else args.stream
    _stream_of(args)
    wanted = LiveFilter(stream, args.type, args.verdict, args.reason, args.door)
    follow_live(settings, wanted, as_json=args.json, check_reader=_refuse_without_reader)
    return 0


def _refuse_without_reader() -> bool:
    """False while somebody reads what we print; BrokenPipeError when nobody does, though no row comes."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    if any(events & select.POLLERR for _, events in watch.poll(0)):
        raise BrokenPipeError
    return False


def _nothing() -> int:
    print("trunkline tail: there is no such row in the ledger", file=sys.stderr)
    return _NOTHING_FOUND


def _filter(args: argparse.Namespace) -> LedgerFilter:
    from connectors.ledger_files.ledger_reader import LedgerFilter

    kind, name = _stream_of(args)
    return LedgerFilter(
        stream_kind=kind,
        stream_id=name,
        verdict=args.verdict,
        reason=args.reason,
        door=args.door,
        type=args.type,
    )


def _stream_of(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """Kind and id of the stream that is asked for. Raises UsageError for what is none."""
    if args.job is not None:
        if not is_job_id(args.job):
            raise UsageError(f"--job: not a job id (8 lower-case hex digits): {args.job!r}")
        return JOB, args.job
    if args.stream is not None:
        stream = parse_stream_key(args.stream.encode("utf-8", "surrogateescape"))
        if stream is None:
            raise UsageError(f"--stream: expected KIND/ID such as refused/mqtt: {args.stream!r}")
        return stream
    return None, None


def _print(part: LedgerPart, as_json: bool) -> None:
    coloured = is_coloured()
    for row in part.rows.to_pylist():
        print(json_line(row) if as_json else text_line(row, coloured=coloured))
    sys.stdout.flush()
