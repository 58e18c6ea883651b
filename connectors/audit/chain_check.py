"""Whether the audit chain is whole: each entry as it was written, after the one before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from connectors.audit.findings import CHAIN_BROKEN, ENTRIES_MISSING, ENTRY_CHANGED, MADE_ANEW, Finding
from schemas.audit_chain import BEFORE_THE_FIRST, ChainEntry, ChainLine, PartitionRoot, commit_root
from schemas.ledger_leaves import ENCODINGS

# Kafka's offsets may have holes; an entry that claims more of them than this has no memory of ours.
_HOLES_MOST = 1_000_000


class Span(NamedTuple):
    """What one entry says of one partition."""

    number: int
    version: int
    encoding: int
    root: PartitionRoot


class CheckedChain:
    """Takes the chain's lines in their order and keeps what the other checks need."""

    def __init__(self, table_id: str) -> None:
        self.findings: list[Finding] = []
        self.spans: list[Span] = []
        self.values: dict[int, str] = {}
        self.last: ChainLine | None = None
        self.start: dict[int, int] = {}
        self._table_id = table_id
        self._ends: dict[int, int] = {}

    def add_file(self, lines: Iterable[ChainLine | None], newest_version: int) -> None:
        """The lines of the chain file, without those of commits after the version that is looked at."""
        for number, line in enumerate(lines, 1):
            if line is None:
                self._say(CHAIN_BROKEN, f"line {number} of the chain file is no entry")
            elif line.version <= newest_version:
                self._add(line)

    def add_log(self, lines: Iterable[ChainLine]) -> None:
        """The entries that stand in the table's own log: those that the file has must be the same there."""
        for line in lines:
            number = line.entry.number
            known = self.values.get(number)
            if known is None or self.last is None or number > self.last.entry.number:
                self._add(line)
            elif known != line.value:
                text = f"entry {number} in the chain file is not the one in the table's commit {line.version}"
                self._say(ENTRY_CHANGED, text, line)

    def _say(self, what: str, text: str, line: ChainLine | None = None) -> None:
        if line is None:
            self.findings.append(Finding(what, text))
        else:
            self.findings.append(Finding(what, text, entry=line.entry.number, version=line.version))

    def _add(self, line: ChainLine) -> None:
        entry, before = line.entry, self.last
        expected = 0 if before is None else before.entry.number + 1
        if entry.number < expected:
            self._say(
                CHAIN_BROKEN, f"entry {entry.number} stands after entry {expected - 1} in the chain", line
            )
            return
        if entry.number > expected:
            text = f"entries {expected} to {entry.number - 1} of the chain are missing"
            self._say(ENTRIES_MISSING, text, line)
        elif entry.previous != (BEFORE_THE_FIRST if before is None else before.value):
            text = f"the chain is broken at entry {entry.number}: it does not follow the one before it"
            self._say(CHAIN_BROKEN, text, line)
        if entry.value() != line.value:
            text = f"entry {entry.number} of the chain was changed: its value is another"
            self._say(ENTRY_CHANGED, text, line)
        elif (wrong := self._contradiction(entry)) is not None:
            self._say(ENTRY_CHANGED, f"entry {entry.number} of the chain contradicts itself: {wrong}", line)
        if entry.table != self._table_id:
            text = f"entry {entry.number} of the chain is of another table ({entry.table})"
            self._say(MADE_ANEW, text, line)
        if before is None:
            self.start = entry.start
            self._ends.update(entry.start)
        self._keep(line)

    def _contradiction(self, entry: ChainEntry) -> str | None:
        if entry.encoding not in ENCODINGS:
            return f"its encoding {entry.encoding} is unknown to this version"
        if commit_root(entry.partitions) != entry.root:
            return "its root is not that of its partitions"
        if entry.start and entry.number:
            return "only the first one says where the chain begins"
        return None

    def _keep(self, line: ChainLine) -> None:
        entry = line.entry
        for root in entry.partitions:
            covered, end = root.last - root.first + 1, self._ends.get(root.partition, 0)
            if root.rows < 1 or not root.rows <= covered <= root.rows + _HOLES_MOST or root.first < end:
                text = (
                    f"entry {entry.number} of the chain claims impossible offsets of partition {root.partition}"
                )
                self._say(ENTRY_CHANGED, text, line)
            elif entry.encoding in ENCODINGS:
                self.spans.append(Span(entry.number, line.version, entry.encoding, root))
                self._ends[root.partition] = root.last + 1
        self.values[entry.number] = line.value
        self.last = line
