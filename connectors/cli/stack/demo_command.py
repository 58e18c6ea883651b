"""Shows the whole way of an event, in a minute: with real Kafka, Mosquitto, bridge, gateway, Spark and tables.

Registers jobs, lets agents publish their events over MQTT and misbehaving clients disturb them, waits until the
ledger has all events and compares the ledger with the plan. The receipts must agree with the ledger, and a
session that picked its job at the gateway must end with it. By default the demo starts a stack of its own, with
free ports and a temporary data directory, and stops it at the end; only tables, keys and logs stay.

Exit codes: 0 when the ledger holds exactly what was planned; 1 when it does not, naming each difference.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import path
from connectors.cli.shared.call import Call
from trunkline_agent.errors import UsageError

if TYPE_CHECKING:
    from connectors.tools.demo.performance import Performance
    from schemas.settings.settings import Settings

_STEPS = 7


ARGUMENTS = (
    argument("--jobs", "how many jobs (default: 20)", type=int, default=20, metavar="N"),
    flag("--json", "end standard output with one line of JSON"),
    flag("--keep", "use the configured stack, as 'up' starts it, and leave it up"),
    path("--data-dir", "where all data is stored (default: a new temporary folder)", "DIR"),
)


def run(call: Call) -> int:
    """Run `trunkline demo`, print its report and return the exit code: 0 if all is as planned, else 1.

    Raises UsageError for a wrong argument, and TrunklineError if a part of the stack does not start or answer.
    """
    # Imported here, because Arrow, paho and rich are slow to import and help must be quick.
    from connectors.tools.demo.plan import JOBS_LEAST, PAYLOAD_LIMIT_LEAST_BYTES

    if call.jobs < JOBS_LEAST:
        raise UsageError(f"--jobs: the demo needs {JOBS_LEAST} or more, one for each role")
    if call.settings.limits.payload_bytes < PAYLOAD_LIMIT_LEAST_BYTES:
        raise UsageError(f"limits.payload_bytes: the demo needs {PAYLOAD_LIMIT_LEAST_BYTES} or more")
    started = time.monotonic()
    performance, used = _perform(call)
    if not call.json or sys.stdout.isatty():
        from connectors.tools.demo.report import show

        show(performance, used)
    outcome = performance.outcome
    for difference in outcome.differences:
        print(f"differs: {difference}", file=sys.stderr)
    _explain_what_stays(call, used)
    if call.json:
        print(json.dumps(_numbers(performance, time.monotonic() - started)))
    return 1 if outcome.differences else 0


def _perform(call: Call) -> tuple[Performance, Settings]:
    """Play the demo. Return the result and the settings of the stack."""
    from connectors.tools.demo.performance import perform
    from connectors.tools.demo.stage_stack import Progress, clear_spent, kept_stack, own_settings, own_stack

    progress = Progress(_STEPS)
    if call.keep:
        used = call.settings
        if call.data_dir is not None:
            used = call.settings.model_copy(update={"data_dir": call.data_dir.absolute()})
        with kept_stack(used, progress) as tick:
            return perform(used, call.jobs, progress, tick), used
    is_temporary = call.data_dir is None
    data_dir = Path(tempfile.mkdtemp(prefix="trunkline-demo-")) if is_temporary else call.data_dir
    used = own_settings(call.settings, data_dir)
    progress.say(f"All data of this demo is in {used.data_path}")
    try:
        with own_stack(used, progress) as tick:
            performance = perform(used, call.jobs, progress, tick)
    except KeyboardInterrupt:
        if is_temporary:
            shutil.rmtree(data_dir, ignore_errors=True)
        raise
    if is_temporary and not performance.outcome.differences:
        clear_spent(data_dir)
    return performance, used


def _explain_what_stays(call: Call, used: Settings) -> None:
    elsewhere = call.data_dir is not None or not call.keep
    folder = shlex.quote(str(used.data_path))
    setting = f"TRUNKLINE__DATA_DIR={folder} " if elsewhere else ""
    lines = [f"Look at it:  {setting}./trunkline tail --no-follow -n 50"]
    if call.keep:
        lines.append(f"It runs on:  {setting}./trunkline status")
        lines.append(f"Stop it:     {setting}./trunkline down")
    elif call.data_dir is None:
        lines.append(f"Remove it:   rm -r {folder}")
    for line in lines:
        print(line, file=sys.stderr)


def _numbers(performance: Performance, seconds: float) -> dict[str, object]:
    names = ("sent", "accepted", "duplicate", "rejected", "jobs")
    numbers = {name: getattr(performance.outcome, name) for name in names}
    receipts = {**performance.receipts.verdicts, "durable": performance.receipts.durable}
    return {**numbers, "receipts": receipts, "seconds": round(seconds, 1)}
