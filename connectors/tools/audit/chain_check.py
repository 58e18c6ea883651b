"""Checks that the audit chain is whole, and still has every entry that a signed anchor has confirmed.

Each entry must be as it was written and follow the one before it. Each offset from the chain's start to its end
must be in one entry. The kinds of errors that any check of the audit can find are here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from schemas.integrity.audit_anchors import Anchor, Statement, is_signed_by
from schemas.integrity.audit_chain import BEFORE_THE_FIRST, ChainEntry, ChainLine, PartitionRoot, commit_root
from schemas.integrity.ledger_leaves import ENCODINGS

# A limit for the offsets of one partition in an entry, more than any micro-batch has, to bound the memory.
_OFFSETS_MOST: Final = 2**24


class Fault(StrEnum):
    """The kinds of errors that an audit finds in a ledger, its chain or its anchors."""

    ROW_CHANGED = "row_changed"
    ROW_MISSING = "row_missing"
    ROW_ADDED = "row_added"
    ROW_TWICE = "row_twice"
    NEVER_SETTLED = "never_settled"
    FILE_UNREADABLE = "file_unreadable"
    ENTRY_CHANGED = "entry_changed"
    ENTRIES_MISSING = "entries_missing"
    CHAIN_BROKEN = "chain_broken"
    END_CUT_OFF = "end_cut_off"
    ANCHOR_FORGED = "anchor_forged"
    ANCHORS_MISSING = "anchors_missing"
    MADE_ANEW = "made_anew"
    HIDDEN_ROWS = "hidden_rows"


@dataclass(frozen=True)
class Finding:
    """One error in the ledger, its chain or its anchors. A field about its place is None if it is unknown.

    Attributes:
        what: The kind of error.
        text: A description for people.
        partition: The Kafka partition of the offsets.
        first: The first offset.
        last: The last offset.
        entry: The number of the chain's entry.
        version: The version of the ledger that the entry's commit made.
    """

    what: Fault
    text: str
    partition: int | None = None
    first: int | None = None
    last: int | None = None
    entry: int | None = None
    version: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the finding as a JSON object, without the fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def offsets_text(partition: int, first: int, last: int) -> str:
    """Return a text such as `partition 3, offset 7` or `partition 3, offsets 7 to 9`."""
    return f"partition {partition}, " + (f"offset {first}" if first == last else f"offsets {first} to {last}")


class Span(NamedTuple):
    """The part of one chain entry about one Kafka partition.

    Attributes:
        number: The number of the entry.
        version: The version of the ledger that the entry's commit made.
        encoding: The number of the encoding by which its rows were hashed.
        root: The offsets, the number of rows and their Merkle root.
    """

    number: int
    version: int
    encoding: int
    root: PartitionRoot


class CheckedChain:
    """The audit chain of a ledger, which checks each entry when it is added.

    First call `add_file`, then `add_log`.

    Attributes:
        findings: The errors that were found so far.
        spans: The parts of all usable entries by partition, in the order of the chain.
        values: The stored hash of each entry, by its number.
        last: The last entry. None: the chain is empty.
        start: The ends of the ledger by partition when the chain began. Rows below them have no root.
    """

    def __init__(self, table_id: str) -> None:
        self.findings: list[Finding] = []
        self.spans: list[Span] = []
        self.values: dict[int, str] = {}
        self.last: ChainLine | None = None
        self.start: dict[int, int] = {}
        self._table_id = table_id
        self._ends: dict[int, int] = {}
        self._rows = 0

    def add_file(self, lines: Iterable[ChainLine | None], newest_version: int) -> None:
        """Add the lines of the chain file and check each of them. Errors are added to `findings`.

        Args:
            lines: The lines in order; None for a line that cannot be parsed, which is a finding.
            newest_version: Lines of later commits are ignored, because the ledger is read at this version.
        """
        for number, line in enumerate(lines, 1):
            if line is None:
                self._say(Fault.CHAIN_BROKEN, f"line {number} of the chain file is no entry")
            elif line.version <= newest_version:
                self._add(line)

    def add_log(self, lines: Iterable[ChainLine]) -> None:
        """Add and check the entries in the ledger's Delta log that the chain file lacks.

        Errors are added to `findings`. An entry that differs from the one in the chain file is such an error.
        """
        for line in lines:
            number = line.entry.number
            known = self.values.get(number)
            if known is None or self.last is None or number > self.last.entry.number:
                self._add(line)
            elif known != line.value:
                text = f"entry {number} in the chain file is not the one in the table's commit {line.version}"
                self._say(Fault.ENTRY_CHANGED, text, line)

    def _say(self, what: Fault, text: str, line: ChainLine | None = None, *where: int) -> None:
        """Add a finding. `where`: partition, first and last offset."""
        partition, first, last = where or (None, None, None)
        number, version = (None, None) if line is None else (line.entry.number, line.version)
        self.findings.append(Finding(what, text, partition, first, last, number, version))

    def _add(self, line: ChainLine) -> None:
        entry, before = line.entry, self.last
        expected = 0 if before is None else before.entry.number + 1
        if entry.number < expected:
            text = f"entry {entry.number} stands after entry {expected - 1} in the chain"
            self._say(Fault.CHAIN_BROKEN, text, line)
            return
        if entry.number > expected:
            text = f"entries {expected} to {entry.number - 1} of the chain are missing"
            self._say(Fault.ENTRIES_MISSING, text, line)
            # Their offsets are missing with them, and are not reported again.
            self._ends = entry.ends | {root.partition: root.first for root in entry.partitions}
            self._rows = entry.rows - sum(root.rows for root in entry.partitions)
        elif entry.previous != (BEFORE_THE_FIRST if before is None else before.value):
            text = f"the chain is broken at entry {entry.number}: it does not follow the one before it"
            self._say(Fault.CHAIN_BROKEN, text, line)
        if before is None:
            self.start = entry.start
            self._ends.update(entry.start)
        if entry.value() != line.value:
            text = f"entry {entry.number} of the chain was changed: its value is another"
            self._say(Fault.ENTRY_CHANGED, text, line)
        elif (wrong := self._contradiction(entry)) is not None:
            self._say(
                Fault.ENTRY_CHANGED, f"entry {entry.number} of the chain contradicts itself: {wrong}", line
            )
        if entry.table != self._table_id:
            text = f"entry {entry.number} of the chain is of another table ({entry.table})"
            self._say(Fault.MADE_ANEW, text, line)
        self._keep(line)

    def _contradiction(self, entry: ChainEntry) -> str | None:
        if entry.encoding not in ENCODINGS:
            return f"its encoding {entry.encoding} is unknown to this version"
        if commit_root(entry.partitions) != entry.root:
            return "its root is not that of its partitions"
        if entry.start and entry.number:
            return "only the first one says where the chain begins"
        if entry.ends != self._ends | {root.partition: root.last + 1 for root in entry.partitions}:
            return "its ends are not those of its partitions"
        if entry.rows != self._rows + sum(root.rows for root in entry.partitions):
            return "its rows are not those of all entries up to it"
        return None

    def _keep(self, line: ChainLine) -> None:
        entry = line.entry
        for root in entry.partitions:
            covered, end = root.last - root.first + 1, self._ends.get(root.partition, 0)
            if not 1 <= root.rows <= covered <= _OFFSETS_MOST or root.first < end:
                text = (
                    f"entry {entry.number} of the chain claims impossible offsets of partition {root.partition}"
                )
                self._say(Fault.ENTRY_CHANGED, text, line)
                continue
            self._find_never_settled(root, end, line)
            self._ends[root.partition] = root.last + 1
            self._rows += root.rows
            if entry.encoding in ENCODINGS:
                self.spans.append(Span(entry.number, line.version, entry.encoding, root))
        self.values[entry.number] = line.value
        self.last = line

    def _find_never_settled(self, root: PartitionRoot, end: int, line: ChainLine) -> None:
        """Report offsets without a row.

        The topic has a record at each offset: no record is ever deleted, and our producers use no transactions.
        The end of another program's transaction has none, and is reported, too.
        """
        if root.first > end:
            text = f"never settled: {offsets_text(root.partition, end, root.first - 1)}"
            self._say(Fault.NEVER_SETTLED, text, line, root.partition, end, root.first - 1)
        holes = root.last - root.first + 1 - root.rows
        if holes:
            text = f"{holes} never settled among {offsets_text(root.partition, root.first, root.last)}"
            self._say(Fault.NEVER_SETTLED, text, line, root.partition, root.first, root.last)


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
