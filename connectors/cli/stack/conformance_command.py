"""Check a client in any language: run it behind lines of JSON against vectors and a live stack with faults.

COMMAND starts an adapter of the client, as docs/reference/conformance_protocol.md describes it. The kit signs
nasty values with it, cuts and holds its connections, kills it between outbox, send and answer, lets its leases
end, forges receipts, and looks at the log afterwards.

  ./trunkline conformance -- python my_adapter.py
  ./trunkline conformance --only signatures --only topics -- node my_adapter.js
  ./trunkline conformance --hub http://127.0.0.1:3200 -- ./my_adapter
  ./trunkline conformance --list

Without --hub the command starts a stack of its own, with free ports and a temporary data directory. With it,
the MQTT broker is that of the settings. A check of a feature that the client lacks is "not supported", which is
no failure. Exit codes: 0, no check failed; 1, one failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import path
from connectors.cli.shared.call import Call
from trunkline_agent.errors import UsageError

if TYPE_CHECKING:
    from connectors.tools.conformance.run import Client, Result
    from connectors.tools.conformance.target import Target

ARGUMENTS = (
    argument(
        "--only", "run this check; may be given several times", action="append", default=[], metavar="NAME"
    ),
    argument("--hub", "the address of a hub that runs (default: a stack of its own)", metavar="URL"),
    path("--operator-token-file", "the token of the operator of --hub (default: that of the settings)", "FILE"),
    flag("--list", "list the checks, and run none"),
    flag("--json", "print one JSON object instead of a table"),
    argument("command", "the client's command, after --", nargs="*", metavar="COMMAND"),
)


def run(call: Call) -> int:
    """Run `trunkline conformance` and return the exit code: 1 if a check failed, else 0.

    Raises UsageError for wrong arguments, and TrunklineError if the stack does not start or answer.
    """
    from connectors.tools.conformance.client_process import ClientMisbehaved
    from connectors.tools.conformance.run import CHECKS, FAILED, greet, run_checks, wanted_checks

    if call.list:
        return _show_list(call, [(check.name, check.says, sorted(check.needs)) for check in CHECKS])
    checks = wanted_checks(call.only)
    if not call.command:
        raise UsageError("name the client's command: trunkline conformance -- COMMAND")
    try:
        client = greet(call.command)
    except ClientMisbehaved as error:
        return _show_misbehaved(call, str(error))
    needs_stack = any(check.needs_stack and check.needs <= client.features for check in checks)
    progress = _Progress()
    with _target(call) if needs_stack else nullcontext() as target:
        results = run_checks(call.command, client, checks, target, progress.show)
    _show(call, client, results)
    return 1 if any(one.outcome == FAILED for one in results) else 0


@contextmanager
def _target(call: Call) -> Iterator[Target]:
    from connectors.tools.conformance.target import named_target, own_target

    if call.hub is not None:
        yield named_target(call.settings, call.hub, call.operator_token_file)
        return
    if call.operator_token_file is not None:
        raise UsageError("--operator-token-file belongs to --hub")
    print("Starting Kafka, Mosquitto, bridge and gateway ...", file=sys.stderr, flush=True)
    with own_target(call.settings) as target:
        yield target
        print("Stopping them ...", file=sys.stderr, flush=True)


class _Progress:
    """Prints a line on standard error for each check that is done."""

    def __init__(self) -> None:
        self._done = 0

    def show(self, result: Result) -> None:
        """Print a result."""
        self._done += 1
        print(f"{self._done:>3} {result.check.name}: {result.outcome}", file=sys.stderr, flush=True)


def _show_list(call: Call, checks: Sequence[tuple[str, str, list[str]]]) -> int:
    rows = [{"check": name, "says": says, "needs": needs} for name, says, needs in checks]
    if call.json:
        print(json.dumps({"checks": rows}))
        return 0
    for name, says, needs in checks:
        print(f"{name} ({', '.join(needs)})\n    {says}.")
    return 0


def _show_misbehaved(call: Call, why: str) -> int:
    from trunkline_agent.terminal_text import escaped

    if call.json:
        print(json.dumps({"client": None, "why": why, "results": []}))
    else:
        print("\n".join(escaped(line) for line in why.splitlines()), file=sys.stderr)
    return 1


def _show(call: Call, client: Client, results: Sequence[Result]) -> None:
    from connectors.cli.shared.text_output import aligned
    from connectors.tools.conformance.run import FAILED, NOT_SUPPORTED, PASSED
    from trunkline_agent.terminal_text import escaped

    counts = {
        outcome: sum(one.outcome == outcome for one in results) for outcome in (PASSED, FAILED, NOT_SUPPORTED)
    }
    if call.json:
        about = {
            "name": client.name,
            "version": client.version,
            "features": sorted(client.features),
        }
        print(json.dumps({"client": about, "counts": counts, "results": [one.as_json() for one in results]}))
        return
    rows = [(one.check.name, one.outcome, f"{one.seconds:.1f} s") for one in results]
    print(aligned(("CHECK", "RESULT", "TIME"), rows))
    for one in results:
        if one.outcome == FAILED:
            print(f"\n{one.check.name} failed. {one.check.says}.\n    {escaped(one.why)}")
            for line in one.noise.splitlines():
                print(f"    stderr: {escaped(line)}")
        elif one.outcome == NOT_SUPPORTED:
            print(f"\n{one.check.name} is not supported: {one.why}")
    found = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    print(f"\n{escaped(client.name)} {escaped(client.version)}: {found}")
