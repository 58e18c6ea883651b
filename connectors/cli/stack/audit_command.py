"""Checks that the ledger was not changed: its rows against the audit chain, the chain against its anchors.

  trunkline audit verify                              everything as the settings name it
  trunkline audit verify --anchors /srv/anchors --public-key audit.pub
  trunkline audit public-key                          for an auditor to keep, together with the anchors
  trunkline audit anchors                             the anchors that were made

verify reads the whole ledger and needs no part of the stack; it may run. Progress is on standard error.
Exit codes: 0 nothing was changed; 1 something was, and the findings name it; 2 wrong arguments;
3 there is no ledger, or none with roots.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from connectors.cli.shared.actions import Actions, argument, flag
from connectors.cli.shared.call import Call
from trunkline_agent.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from connectors.tools.audit.verification import Report

_SHOWN = 20
_EVERY_S = 2.0
_ANCHORS: Final = argument("--anchors", "the folder of the anchors, a file or a URI", metavar="PLACE")
ACTIONS: Final = Actions()


@ACTIONS.add(
    _ANCHORS,
    argument(
        "--public-key", "the auditor's copy of it", type=Path, action="append", default=[], metavar="FILE"
    ),
    flag("--without-anchors", "check rows and chain only: this does not detect a cut-off end"),
)
def _verify(call: Call) -> int:
    """Check rows, chain and anchors."""
    from connectors.cli.shared.text_output import print_json
    from connectors.tools.audit.verification import verify

    began = time.monotonic()
    how = {"without_anchors": call.without_anchors, "progress": _progress()}
    report = verify(call.settings, call.anchors, call.public_key, **how)
    took_s = round(time.monotonic() - began, 2)
    if call.json:
        print_json({**report.fields(), "took_s": took_s})
    else:
        _print_report(report, took_s)
    return 0 if report.is_true else 1


def _progress() -> Callable[[int], None]:
    """Return a function that prints on standard error, every two seconds, how many rows were read."""
    last = time.monotonic()

    def show(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY_S:
            last = time.monotonic()
            print(f"{rows} rows read", file=sys.stderr)

    return show


def _print_report(report: Report, took_s: float) -> None:
    from connectors.tools.audit.chain_check import moment_text
    from trunkline_agent.terminal_text import escaped

    for finding in report.findings[:_SHOWN]:
        print(f"WRONG  {escaped(finding.text)}")
    if len(report.findings) > _SHOWN:
        print(f"WRONG  and {len(report.findings) - _SHOWN} more; --json shows {len(report.findings)} or 1000")
    print(f"ledger   {report.rows} rows at version {report.version}, read in {took_s} s")
    print(f"chain    {report.entries} entries")
    if older := report.rows_before_the_chain:
        print(f"         {older} rows are older than the chain: nothing is known of them")
    if report.anchored_at_us is not None:
        print(f"anchors  {report.anchors}, the newest of {moment_text(report.anchored_at_us)}")
    if report.rows_not_anchored > 0:
        print(f"         {report.rows_not_anchored} rows are not anchored: their end could be cut off unseen")
    if report.anchors_beside is not None:
        print("         they lie beside the ledger: who cuts its end off there can cut off theirs, unseen")
        print("         (set audit.anchors_dir to other storage, or name copies with --anchors)")
    if report.anchors_unreadable:
        print(f"         {report.anchors_unreadable} lines are no anchors and were passed over")
    if report.is_true:
        print("All rows are as they were settled.")
    else:
        print("The ledger is not as it was settled: docs/how-to/verify_the_ledger.md says what to do.")


@ACTIONS.add(_ANCHORS)
def _anchors(call: Call) -> int:
    """Show the anchors, the newest last; checks no signature."""
    from connectors.cli.shared.text_output import aligned, print_json
    from connectors.tools.audit.chain_check import moment_text
    from connectors.tools.audit.verification import anchors_place
    from schemas.integrity.audit_anchors import read_anchors

    place = anchors_place(call.settings, call.anchors)
    if not place.exists():
        raise NotFound(f"there are no anchors: no {place}. 'streams' makes them")
    anchors = [anchor for anchor in read_anchors(place) if anchor is not None]
    rows = [
        (moment_text(a.statement.time_us), a.statement.length, a.statement.rows, a.statement.value[:16], a.key)
        for a in anchors
    ]
    if call.json:
        names = ("time", "entries", "rows", "value", "key")
        print_json({"anchors": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        print(aligned(("TIME", "ENTRIES", "ROWS", "VALUE", "KEY"), rows))
    return 0


@ACTIONS.add(takes_json=False)
def _public_key(call: Call) -> int:
    """Print the public key that verifies the anchors."""
    from schemas.integrity.audit_anchors import anchor_public_key_file

    file = anchor_public_key_file(call.settings)
    if not file.exists():
        raise NotFound(f"there is no key yet: no {file}. 'streams' makes it with the first anchor")
    print(file.read_text(encoding="ascii"), end="")
    return 0
