"""Check every part, from Python to the views, and say how to mend what is wrong.

Exit code 1 if a check failed, else 0; what is merely not started is a warning.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from connectors.cli.doctor.doctor_checks import run_checks
from connectors.cli.doctor.doctor_findings import FAIL, OK, WARN
from schemas.settings.settings import Settings

_COLOURS = {OK: "\033[32m", WARN: "\033[33m", FAIL: "\033[31m"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Make the checks and print them."""
    findings = run_checks(settings)
    failed = any(finding.level == FAIL for finding in findings)
    if args.json:
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
