"""Runs the whole audit: compares the ledger's rows with the audit chain, and the chain with the anchors.

The parts are read in this order, in which a growing ledger looks whole: first the anchors, then the table's
version, then its log, then the chain file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from connectors.tools.audit.chain_check import CheckedChain, Fault, Finding, check_anchors
from connectors.tools.audit.ledger_files_reader import LedgerFiles
from connectors.tools.audit.row_check import WINDOW_ROWS, RowCheck
from schemas.integrity.audit_anchors import (
    ANCHORS,
    Anchor,
    anchor_public_key_file,
    anchors_file,
    chain_file,
    is_beside_the_ledger,
    public_keys_in,
    read_anchors,
)
from schemas.integrity.audit_chain import lines_in_file
from schemas.integrity.line_objects import LinePlace, ObjectLines
from schemas.settings.settings import Settings
from trunkline_agent.errors import NotFound, UsageError

# The number of findings to show; more of them help no reader.
SHOWN_MOST: Final = 1000


@dataclass(frozen=True)
class Report:
    """The result of an audit.

    Attributes:
        version: The version of the ledger that was checked.
        rows: The number of all rows of the ledger.
        rows_before_the_chain: Rows that are older than the chain, and so have no roots.
        rows_not_anchored: Rows that are newer than the newest anchor.
        entries: The number of the chain's entries.
        anchors: The number of anchors that the chain agrees with.
        anchors_unreadable: The number of lines in the anchors file that are no anchors.
        anchored_at_us: The time of the newest of these anchors, in microseconds since 1970. None: there is
            none.
        anchors_beside: The place of the anchors if it is beside the ledger, where both could be changed. Else
            None.
        findings: The errors that were found.
    """

    version: int
    rows: int
    rows_before_the_chain: int
    rows_not_anchored: int
    entries: int
    anchors: int
    anchors_unreadable: int
    anchored_at_us: int | None
    anchors_beside: LinePlace | None
    findings: tuple[Finding, ...]

    @property
    def is_true(self) -> bool:
        """True if the audit has found no error in the ledger, its chain and its anchors."""
        return not self.findings

    def fields(self) -> dict[str, Any]:
        """Return the report as a JSON object, with at most 1,000 findings and the number of the others."""
        shown = [finding.fields() for finding in self.findings[:SHOWN_MOST]]
        return {
            "true": self.is_true,
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "anchors_beside": None if self.anchors_beside is None else str(self.anchors_beside),
            "findings": shown,
            "findings_left_out": len(self.findings) - len(shown),
        }


def verify(
    settings: Settings,
    anchors_at: str | Path | None = None,
    public_keys: Sequence[Path] = (),
    *,
    without_anchors: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
    window_rows: int = WINDOW_ROWS,
) -> Report:
    """Check the ledger that the settings name against its audit chain and its anchors. Nothing is changed.

    Args:
        settings: The settings with the tables and the default places.
        anchors_at: A folder, a file or a URI of anchors. None: the place of the settings.
        public_keys: Files with the public keys that may have signed anchors. Empty: the file of the settings.
        without_anchors: Check only the chain and the rows. False: a missing anchors file is a finding.
        progress: Called from time to time with the number of rows that were read so far.
        window_rows: How many rows to check at a time, which bounds the memory.

    Returns:
        The report. Errors in the ledger are findings in it, and nothing is raised for them.

    Raises:
        NotFound: There is no ledger, or neither chain nor anchors to check it against.
        UsageError: There are anchors, but no public key.
        TrunklineError: The ledger cannot be read.
    """
    place = anchors_place(settings, anchors_at)
    anchors: list[Anchor | None] = []
    keys: dict[str, Ed25519PublicKey] = {}
    if not without_anchors and place.exists():
        anchors = read_anchors(place)
        keys = _public_keys(settings, public_keys)
    files = LedgerFiles(settings)
    chain = CheckedChain(files.table_id)
    in_log = files.log_lines()
    chain.add_file(lines_in_file(chain_file(settings, files.table_id)), files.version)
    chain.add_log(in_log)
    if chain.last is None and not chain.findings and not any(anchors):
        raise NotFound("no commit of this ledger has a root yet: it is as old as this version, or is empty")
    findings = list(chain.findings)
    encodings = {span.encoding for span in chain.spans}
    findings += [Finding(Fault.HIDDEN_ROWS, text) for text in files.hiding(encodings)]
    checked = check_anchors(anchors, keys, chain, files.table_id)
    if not without_anchors:
        where = "" if place.exists() else f" (there is no {place})"
        findings += [
            Finding(f.what, f.text + where) if f.what == Fault.ANCHORS_MISSING else f for f in checked.findings
        ]
    rows = RowCheck(files, chain, progress, window_rows)
    rows.run()
    covered = 0 if chain.last is None else chain.last.entry.rows
    return Report(
        version=files.version,
        rows=rows.rows,
        rows_before_the_chain=rows.before_the_chain,
        rows_not_anchored=covered - (0 if checked.newest is None else checked.newest.rows),
        entries=len(chain.values),
        anchors=checked.good,
        anchors_unreadable=checked.unreadable,
        anchored_at_us=None if checked.newest is None else checked.newest.time_us,
        anchors_beside=place if anchors and is_beside_the_ledger(settings, place) else None,
        findings=(*findings, *rows.findings),
    )


def anchors_place(settings: Settings, named: str | Path | None) -> LinePlace:
    """Return the place of the anchors, whether it exists or not.

    Args:
        settings: The settings with the default place.
        named: The file, the folder in which it is, or a URI. None: the default place.
    """
    if named is None:
        return anchors_file(settings)
    if "://" in str(named):
        return ObjectLines(str(named))
    path = Path(named)
    return path / ANCHORS if path.is_dir() else path


def _public_keys(settings: Settings, given: Sequence[Path]) -> dict[str, Ed25519PublicKey]:
    default = anchor_public_key_file(settings)
    if not given and not default.exists():
        raise UsageError(f"--public-key: name the file with the public key; there is none at {default}")
    return {name: key for path in given or (default,) for name, key in public_keys_in(path).items()}
