"""Shows which version of the fold settles the ledger, and switches the ledger to this program's version.

  trunkline fold status        the ledger's version, this program's, and the records that are not folded yet
  trunkline fold switch        switch the ledger to this program's version

A new version of the fold may decide differently, so it begins at the same record for all programs: with the
doors closed, and the whole log settled by the old version. The order: let the old version catch up, stop it
(./trunkline down), install the new one, start Kafka alone (./trunkline up --only kafka), switch, start the rest
(./trunkline down; ./trunkline up). Settled rows do not change; programs of another version do not start.
Exit codes: 0, also when it was switched before; 2 a token file that cannot be used; 3 no ledger; 4 refused,
with the reason; 5 Kafka is away, which is no error for `status`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.actions import Actions
from connectors.cli.shared.call import Call
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_PROGRAM = "switch_fold"
_ERRORS = {error.exit_code: error for error in (UsageError, NotFound, Refused, BackboneUnreachable)}
# The parts of the stack that append nothing by themselves.
_BROKERS: Final = {"kafka", "mosquitto"}
ACTIONS: Final = Actions()


@ACTIONS.add()
def _status(call: Call) -> int:
    """Show the versions and the records that ledger and views lack."""
    state = fold_state(call.settings)
    found = {**state, **left_in_log(call.settings, state)}
    left = "records of the log that are left: {left[ledger]} for the ledger, {left[views]} for the views"
    if found["left"] is None:
        left = "how many records of the log are left is not known: {why}"
    text = "version {ledger_version} settles the ledger, this program has {program_version}"
    return _print(call, found, f"{text}; ledger up to {{ledger}}, views up to {{views}}; {left}")


@ACTIONS.add()
def _switch(call: Call) -> int:
    """Switch the ledger to this program's version."""
    state, switched = switch_fold(call.settings)
    text = "from now on version {program_version} settles the ledger; start the rest: ./trunkline up"
    if not switched:
        text = "the ledger is settled by version {program_version} already"
    return _print(call, {**state, "switched": switched}, text)


def switch_fold(settings: Settings) -> tuple[dict[str, Any], bool]:
    """Switch the ledger to this program's version, and record it in the log. Kafka must run, and no door.

    Returns:
        The state afterwards (`fold_state`), and whether this call switched.

    Raises:
        NotFound: There is no ledger.
        Refused: A door is open, the ledger lacks records of the log, or it has a newer version.
        BackboneUnreachable: Kafka does not answer.
    """
    state = fold_state(settings)
    switched = state["ledger_version"] != state["program_version"]
    if switched:
        check_doors_closed(settings)
        state = fold_state(settings, "--at", json.dumps(_ends(settings, state)))
    if state["switch"] is not None:
        # Also if an earlier call switched, which may have been killed before it recorded this. The same record
        # again is a duplicate. Gateways record it at their start; then nobody calls this command again.
        _record(settings, state["switch"])
    return state, switched


def check_doors_closed(settings: Settings) -> None:
    """Raise Refused if a program can still append to the log: a part of the local stack, or any gateway.

    It returns nothing if the doors are closed. Kafka's nodes and Mosquitto may run. A gateway
    counts as stopped if it does not answer within 5 s. The check needs no token, but raises UsageError for a
    token file that cannot be used.
    """
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient
    from connectors.programs.local_stack.control import running_state
    from connectors.programs.local_stack.part_plan import group_of
    from connectors.programs.local_stack.stack import parts_alone

    state = running_state(settings)
    running = [*(state["parts"] if state is not None else ()), *parts_alone(settings)]
    is_open = sorted(name for name in set(running) if group_of(name) not in _BROKERS)
    if is_open:
        raise Refused(
            f"the doors are open: {', '.join(is_open)} run; close them first: ./trunkline down, "
            "and unless you upgrade: ./trunkline up --only kafka"
        )
    with GatewayClient(settings) as gateway:
        answers = gateway.answers()
    if answers:
        raise Refused(f"a gateway answers at {settings.gateway_url}: stop it first")


def fold_state(settings: Settings, *arguments: str) -> dict[str, Any]:
    """Run the job `switch_fold`, the only writer of the ledger, and return its answer.

    Args:
        settings: The settings of the tables.
        arguments: Arguments of the job. Without any, it changes nothing.

    Returns:
        The fold versions of ledger and program, and how far ledger and views are.

    Raises:
        NotFound: There is no ledger.
        Refused: The job refused the switch.
        TrunklineError: The job failed.
    """
    return answer_of_job(settings, _PROGRAM, *arguments)


def answer_of_job(
    settings: Settings, name: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a program of `jobs` that prints one JSON object, and return the object.

    Args:
        settings: The settings of the program.
        name: The module below `jobs`.
        arguments: The arguments of the program.
        environment: Further variables of the program.

    Raises:
        NotFound: The program ended with this error, as with those below.
        Refused: See there.
        BackboneUnreachable: See there.
        TrunklineError: The program failed.
    """
    done = run_job(settings, name, *arguments, environment=environment)
    if done.returncode:
        # Spark writes to stderr, too.
        said = [line for line in done.stderr.splitlines() if line.startswith(f"{name}: ")]
        why = said[-1].removeprefix(f"{name}: ") if said else done.stderr.strip()
        raise _ERRORS.get(done.returncode, TrunklineError)(why or f"jobs.{name} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _ends(settings: Settings, state: dict[str, Any]) -> dict[str, int]:
    """Return per partition the end of the log. Raises the errors of `record_ends`."""
    from connectors.log.log_end import record_ends

    settled = {int(number): end for number, end in state["ledger"].items()}
    return {str(number): end for number, end in sorted(record_ends(settings, settled).items())}


def left_in_log(settings: Settings, state: dict[str, Any]) -> dict[str, Any]:
    """Return how many records of the log ledger and views lack (`left`), or why this is not known (`why`).

    `state` is the result of `fold_state`. The log is read now, so a record that came in between counts as left.
    """
    from schemas.streams.control.control_fold import records_left

    try:
        ends = _ends(settings, state)
    except TrunklineError as error:
        return {"log": None, "left": None, "why": str(error)}
    left = records_left(state, ends)
    return {"log": ends, "left": {part: sum(lacks.values()) for part, lacks in left.items()}, "why": None}


def _record(settings: Settings, switch: dict[str, Any]) -> None:
    """Record the switch in the log, for auditors, and for a gateway of the old version that still runs.

    The records that require MACs come after it. They are duplicates if the log has them already.
    """
    from connectors.log.publisher import Publisher
    from schemas.streams.control.control_fold import FoldSwitched
    from schemas.streams.control.record_macs import macs_required_records

    switched = FoldSwitched.model_validate(switch).record(door="stack", principal="operator")
    with Publisher(settings) as publisher:
        for record in (switched, *macs_required_records(settings.kafka.partitions)):
            publisher.append(record).result(settings.kafka.delivery_timeout_s)


def _print(call: Call, found: dict[str, Any], text: str) -> int:
    print(json.dumps(found) if call.json else text.format(**found))
    return 0


_REPORT_EVERY_S: Final = 30.0


def run_job(
    settings: Settings, name: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of `jobs`, and return its exit code and output. While it runs, a line now and then says so.

    The time that it takes grows with the tables, so there is no time limit. An exception in this process, such
    as that of Ctrl-C, ends the program.

    Args:
        settings: The settings of the program.
        name: The module below `jobs`, such as `rebuild_views`.
        arguments: The arguments of the program.
        environment: Further variables of the program.
    """
    from schemas.settings.settings import PROJECT_ROOT, settings_environment

    command = [sys.executable, "-m", f"jobs.{name}", *arguments]
    variables = os.environ | settings_environment(settings) | dict(environment or {})
    began = time.monotonic()
    with subprocess.Popen(  # noqa: S603 ours
        command,
        env=variables,
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    output, errors = process.communicate(timeout=_REPORT_EVERY_S)
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                shown = " ".join((name, *arguments[:1]))
                print(f"  {shown} has run for {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        finally:
            process.kill()
