"""Which version of the fold settles the ledger, and switching on this program's.

  trunkline fold status        the ledger's version, this program's, and what is left for ledger and views
  trunkline fold switch        switch the ledger on to this program's version

A new version of the fold may decide differently, so it begins at one record for everybody: with the doors
closed and all of the log settled by the version before. The order: let the version before catch up, stop it
(./trunkline down), install the new one, start Kafka alone (./trunkline up --only kafka), switch, start the rest
(./trunkline down; ./trunkline up). What was settled before stands; programs of another version do not start.
Exit codes: 0, also when it was switched before; 2 a token file that cannot be used; 3 no ledger; 4 refused,
with the reason; 5 Kafka is away, which `status` only tells.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from connectors.cli.stack.closed_doors import check_doors_closed
from schemas.errors import BackboneUnreachable, NotFound, Refused, TrunklineError

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_PROGRAM = "jobs.switch_fold"
_LIMIT_S = 300
_ERRORS = {error.exit_code: error for error in (NotFound, Refused, BackboneUnreachable)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    status = commands.add_parser("status", help="show the versions and what is left for ledger and views")
    switch = commands.add_parser("switch", help="switch the ledger on to this program's version")
    for command in (status, switch):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    state = _ask(settings)
    if args.action == "status":
        _print_status(args, {**state, **_left(settings, state)})
        return 0
    switched = state["ledger_version"] != state["program_version"]
    if switched:
        check_doors_closed(settings)
        state = _ask(settings, "--at", json.dumps(_ends(settings, state)))
    if state["switch"] is not None:
        # Also when it was switched before, and perhaps killed before it could say so: the same again is a
        # duplicate. Gateways say it at their start, where nobody calls this again.
        _record(settings, state["switch"])
    text = "from now on version {program_version} settles the ledger; start the rest: ./trunkline up"
    if not switched:
        text = "the ledger is settled by version {program_version} already"
    _print(args, {**state, "switched": switched}, text)
    return 0


def _ask(settings: Settings, *arguments: str) -> dict[str, Any]:
    """What the job says, which alone writes the ledger. Raises its error again."""
    from schemas.settings.settings import PROJECT_ROOT, settings_environment

    done = subprocess.run(  # noqa: S603 ours
        [sys.executable, "-m", _PROGRAM, *arguments],
        env=os.environ | settings_environment(settings),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        said = done.stderr.strip().removeprefix("switch_fold: ")
        raise _ERRORS.get(done.returncode, TrunklineError)(said or f"{_PROGRAM} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _ends(settings: Settings, state: dict[str, Any]) -> dict[str, int]:
    """By partition, up to where ledger and views must be to hold the log. Raises what `record_ends` raises."""
    from connectors.log.record_ends import record_ends

    settled = {int(number): end for number, end in state["ledger"].items()}
    return {str(number): end for number, end in sorted(record_ends(settings, settled).items())}


def _left(settings: Settings, state: dict[str, Any]) -> dict[str, Any]:
    """How many records of the log ledger and views lack, or why nobody can tell. The log is looked at after the
    tables: what came in between is left rather than forgotten.
    """
    from schemas.streams.control.control_fold import records_left

    try:
        ends = _ends(settings, state)
    except TrunklineError as error:
        return {"log": None, "left": None, "why": str(error)}
    left = records_left(state, ends)
    return {"log": ends, "left": {part: sum(lacks.values()) for part, lacks in left.items()}, "why": None}


def _record(settings: Settings, switch: dict[str, Any]) -> None:
    """Say it in the log, where an auditor finds it, and a gateway of the version before that still runs."""
    from connectors.log.publisher import Publisher
    from schemas.streams.control.control_fold import FoldSwitched, switched_record

    with Publisher(settings) as publisher:
        record = switched_record(FoldSwitched.model_validate(switch))
        publisher.append(record).result(settings.kafka.delivery_timeout_s)


def _print_status(args: argparse.Namespace, found: dict[str, Any]) -> None:
    text = "version {ledger_version} settles the ledger, this program has {program_version}"
    text = f"{text}; ledger up to {{ledger}}, views up to {{views}}"
    left = "records of the log that are left: {left[ledger]} for the ledger, {left[views]} for the views"
    if found["left"] is None:
        left = "how many records of the log are left is not known: {why}"
    _print(args, found, f"{text}; {left}")


def _print(args: argparse.Namespace, found: dict[str, Any], text: str) -> None:
    print(json.dumps(found) if args.json else text.format(**found))
