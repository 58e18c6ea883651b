"""Checks that the audit chain still contains every entry that a signed anchor has confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from connectors.tools.audit.chain_check import CheckedChain
from connectors.tools.audit.findings import Fault, Finding, offsets_text
from schemas.integrity.audit_anchors import Anchor, Statement, is_signed_by


class AnchorCheck(NamedTuple):
    """The result of the check of the anchors.

    Attributes:
        findings: The contradictions between anchors and chain.
        good: The number of anchors that the chain agrees with.
        newest: The statement of the anchor with the longest chain among these. None: there is no such anchor.
        unreadable: The number of lines that are no anchors, as a crash or a full disk may leave them.
    """

    findings: list[Finding]
    good: int
    newest: Statement | None
    unreadable: int


def moment_text(time_us: int) -> str:
    """Return a time in microseconds since 1970 as ISO 8601. A time out of range is returned as a number."""
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)).isoformat("T", "seconds")
    except OverflowError:
        return f"{time_us} µs"


def check_anchors(
    anchors: Sequence[Anchor | None], keys: dict[str, Ed25519PublicKey], chain: CheckedChain, table_id: str
) -> AnchorCheck:
    """Compare each anchor's signature and statement with the audit chain, and return the findings.

    Args:
        anchors: The lines of the anchors file; None for a line that is no anchor.
        keys: The public keys that may have signed them, by the key id that an anchor has in `key`.
        chain: The audit chain, after `add_file` and `add_log`.
        table_id: The id of the Delta table. Anchors of another table are a finding.

    Returns:
        The findings, and the numbers of good and unreadable anchors. Nothing is raised for a bad anchor.
    """
    findings: list[Finding] = []
    good: list[Statement] = []
    beyond: list[Statement] = []
    of_others: list[Statement] = []
    for number, anchor in enumerate(anchors, 1):
        if anchor is None:
            continue
        said = anchor.statement
        if not is_signed_by(anchor, keys):
            text = f"the anchor in line {number} is not signed by a key that was given (its key: {anchor.key})"
            findings.append(Finding(Fault.ANCHOR_FORGED, text))
        elif said.table != table_id:
            of_others.append(said)
        elif chain.last is None or said.length > chain.last.entry.number + 1:
            beyond.append(said)
        elif chain.values.get(said.length - 1) != said.value:
            text = (
                f"the chain is not the one that was anchored at {moment_text(said.time_us)}: "
                f"its entry {said.length - 1} is another"
            )
            findings.append(Finding(Fault.CHAIN_BROKEN, text, entry=said.length - 1))
        else:
            good.append(said)
    newest = max(good, key=attrgetter("length"), default=None)
    if beyond:
        findings += _cut_off(max(beyond, key=attrgetter("length")), chain)
    if of_others:
        # The newest one of the largest.
        others = max(reversed(of_others), key=attrgetter("rows"))
        text = (
            f"there are anchors of another table ({others.table}) with {others.rows} rows at "
            f"{moment_text(others.time_us)}: the ledger was made anew. If you did that, move them away"
        )
        findings.append(Finding(Fault.MADE_ANEW, text))
    if newest is None and not findings and chain.last is not None:
        text = "there is no anchor: a cut-off end, or a chain written anew, would not be seen"
        findings.append(Finding(Fault.ANCHORS_MISSING, text))
    return AnchorCheck(findings, len(good), newest, sum(anchor is None for anchor in anchors))


def _cut_off(said: Statement, chain: CheckedChain) -> list[Finding]:
    """Return the findings for a chain that is shorter than the longest anchor says."""
    length = 0 if chain.last is None else chain.last.entry.number + 1
    ends = {} if chain.last is None else chain.last.entry.ends
    text = (
        f"the end was cut off: the chain has {length} entries, and had {said.length} with {said.rows} rows at "
        f"{moment_text(said.time_us)}"
    )
    findings = [Finding(Fault.END_CUT_OFF, text, entry=length)]
    for partition, end in sorted(said.ends.items()):
        first = ends.get(partition, 0)
        if first < end:
            text = f"cut off: {offsets_text(partition, first, end - 1)}"
            findings.append(Finding(Fault.END_CUT_OFF, text, partition, first, end - 1))
    return findings
