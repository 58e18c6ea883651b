"""What `trunkline doctor` checks of the audit chain: that its newest entries are anchored, and where."""

from __future__ import annotations

import time

from connectors.cli.doctor.doctor_findings import FAIL, OK, START, WARN, Finding
from connectors.local_stack import control
from connectors.local_stack.part_plan import STREAMS
from schemas.integrity.audit_anchors import read_anchors
from schemas.integrity.audit_chain import last_in_file
from schemas.integrity.audit_files import anchors_file, chain_file, is_beside_the_ledger
from schemas.settings.settings import Settings

_CHECK = "anchors"
_PLACE = "anchors place"
# An anchor is due after one interval; on a busy machine it may come late.
_INTERVALS = 3


def check_anchors_place(settings: Settings) -> Finding:
    """The anchors lie in another place than what they vouch for."""
    place = anchors_file(settings).parent
    if is_beside_the_ledger(settings, place):
        found = f"{place} is beside the ledger: its end could be cut off with its anchors, unseen"
        return Finding(_PLACE, WARN, found, "set audit.anchors_dir (docs/how-to/verify_the_ledger.md)")
    return Finding(_PLACE, OK, f"{place}, apart from the ledger")


def check_anchors(settings: Settings) -> Finding:
    """The audit chain has been signed up to its end, or will be soon."""
    path = anchors_file(settings)
    if not path.exists():
        return Finding(_CHECK, WARN, f"{path} is not there yet", "the streams make it with the first rows")
    whole = [anchor for anchor in read_anchors(path) if anchor is not None]
    if not whole:
        return Finding(_CHECK, FAIL, f"{path} holds no anchor", "./trunkline audit verify says what is left")
    signed = whole[-1].statement
    chain = chain_file(settings, signed.table)
    last = last_in_file(chain)
    length = 0 if last is None else last.entry.number + 1
    age_s = max(0.0, time.time() - signed.time_us / 1e6)
    found = f"the newest of {path} signs {signed.length} commits, {age_s:.0f} s ago"
    if length < signed.length:
        found = f"{found}, and {chain} has {length}"
        return Finding(_CHECK, FAIL, found, "./trunkline audit verify says what is missing")
    if length == signed.length or age_s <= _INTERVALS * settings.audit.anchor_interval_s:
        return Finding(_CHECK, OK, found)
    found = f"{found}; {length - signed.length} have come since"
    state = control.running_state(settings)
    if state is None or STREAMS not in state["parts"]:
        return Finding(_CHECK, WARN, found, START)
    return Finding(_CHECK, FAIL, found, f"trunkline logs {STREAMS} says why: look for audit_trail")
