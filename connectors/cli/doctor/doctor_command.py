"""Check every part, from Python to the views, and say how to repair it.

Exit code 1 if a check failed, else 0; a part that is not started is only a warning.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from connectors.cli.doctor import brokers, findings, gateway, machine, tables
from connectors.cli.doctor.findings import FAIL, OK, WARN, Check, Finding, fail
from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call
from schemas.settings.settings import Settings, SettingsError
from trunkline_agent.errors import TrunklineError

CHECKS: dict[str, Check] = {
    name: check
    for group in (machine, brokers, findings, gateway, tables)
    for name, check in group.CHECKS.items()
}
_COLOURS = {OK: "\033[32m", WARN: "\033[33m", FAIL: "\033[31m"}


ARGUMENTS = (flag("--json", "one JSON object instead of lines"),)


def run(call: Call) -> int:
    """Run all checks and print the findings. Return 1 if one of them is a failure, else 0.

    An error that a check raises is printed as a failure.
    """
    findings = {name: _finding(check, call.settings) for name, check in CHECKS.items()}
    failed = any(finding.level == FAIL for finding in findings.values())
    if call.json:
        checks = [{"check": name, **asdict(finding)} for name, finding in findings.items()]
        print(json.dumps({"ok": not failed, "checks": checks}))
        return 1 if failed else 0
    coloured = sys.stdout.isatty()
    for name, finding in findings.items():
        level = f"{finding.level:<4}"
        shown = f"{_COLOURS[finding.level]}{level}\033[0m" if coloured else level
        print(f"{shown}  {name:<10} {finding.found}")
        if finding.mend:
            print(f"{'':<17}-> {finding.mend}")
    return 1 if failed else 0


def _finding(check: Check, settings: Settings) -> Finding:
    """Return the finding of a check. An error that it raises is a finding itself."""
    try:
        return check(settings)
    except (TrunklineError, SettingsError, OSError) as error:
        return fail(str(error), "the message says what to do")
