"""Check every part, from Python to the views, and say how to repair it.

Exit code 1 if a check failed, else 0; a part that is not started is only a warning.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from connectors.cli.doctor import machine, parts, tables
from connectors.cli.doctor.findings import FAIL, OK, WARN, Check, Finding
from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings, SettingsError

CHECKS: dict[str, Check] = {**machine.CHECKS, **parts.CHECKS, **tables.CHECKS}
_COLOURS = {OK: "\033[32m", WARN: "\033[33m", FAIL: "\033[31m"}


ARGUMENTS = (flag("--json", "one JSON object instead of lines"),)


def run(call: Call) -> int:
    """Run the checks and print the findings."""
    findings = _run_checks(call.settings)
    failed = any(finding.level == FAIL for finding in findings)
    if call.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
        return 1 if failed else 0
    coloured = sys.stdout.isatty()
    for finding in findings:
        level = f"{finding.level:<4}"
        shown = f"{_COLOURS[finding.level]}{level}\033[0m" if coloured else level
        print(f"{shown}  {finding.check:<10} {finding.found}")
        if finding.mend:
            print(f"{'':<17}-> {finding.mend}")
    return 1 if failed else 0


def _run_checks(settings: Settings) -> list[Finding]:
    """Return all findings, in order. A check that raises an error is a finding itself."""
    found = []
    for name, check in CHECKS.items():
        try:
            found.append(check(settings))
        except (TrunklineError, SettingsError, OSError) as error:
            found.append(Finding(name, FAIL, str(error), "the message says what to do"))
    return found
