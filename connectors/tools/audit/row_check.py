"""Checks that the ledger's rows give the Merkle roots in the audit chain.

Rows are hashed in the order in which they are read from the files. Only their hashes are put into the order of
offsets, which takes 37 bytes a row. In a large ledger, a window of entries is checked at a time.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from connectors.tools.audit.chain_check import CheckedChain, Fault, Finding, Span, offsets_text
from connectors.tools.audit.ledger_files_reader import LedgerFiles, LedgerPart
from connectors.tools.audit.statistics_check import StatisticsCheck
from schemas.integrity.audit_chain import MARK_BYTES, MARKS_MOST
from schemas.integrity.ledger_leaves import ENCODINGS, HASH_BYTES, ledger_leaves, root_and_level

# About 150 MB of leaves.
WINDOW_ROWS: Final = 4_000_000
_HASHED_AT_ONCE: Final = 8_192


class _Slots:
    """The hashes of one partition in a window, with a slot for each offset from its first span to its last."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.first = spans[0].root.first if spans else 0
        count = spans[-1].root.last + 1 - self.first if spans else 0
        self.leaves = np.zeros((count, HASH_BYTES), dtype=np.uint8)
        # Wide enough for a file of nothing but copies of one row.
        self.times = np.zeros(count, dtype=np.uint32)
        self._is_covered = np.zeros(count, dtype=bool)
        for span in spans:
            self._is_covered[span.root.first - self.first : span.root.last + 1 - self.first] = True

    def put(self, offsets: Any, leaves: Any) -> None:
        at = offsets - self.first
        self.leaves[at] = leaves
        np.add.at(self.times, at, np.uint32(1))

    def covers(self, offsets: Any) -> Any:
        found = (offsets >= self.first) & (offsets < self.first + len(self.times))
        found[found] = self._is_covered[offsets[found] - self.first]
        return found


class RowCheck:
    """One check of the ledger's rows against the Merkle roots of the audit chain.

    Call `run` once, then read the results.

    Args:
        files: The files of the ledger.
        chain: The chain, after all its lines were added.
        progress: Called from time to time with the number of rows that were read so far.
        window_rows: How many rows to check at a time, which bounds the memory (37 bytes a row).

    Attributes:
        findings: The errors that were found.
        rows: The number of rows in the files.
        before_the_chain: The number of rows that are older than the chain, and so have no root.
    """

    def __init__(
        self,
        files: LedgerFiles,
        chain: CheckedChain,
        progress: Callable[[int], None],
        window_rows: int = WINDOW_ROWS,
    ) -> None:
        self.findings: list[Finding] = []
        self.rows = 0
        self.before_the_chain = 0
        self._files = files
        self._chain = chain
        self._progress = progress
        self._window_rows = window_rows
        self._statistics = StatisticsCheck(files.said)
        self._unreadable: set[str] = set()

    def run(self) -> None:
        """Read all rows of the ledger, hash them, and set `findings`, `rows` and `before_the_chain`.

        An unreadable file is a finding, and nothing is raised for it.
        """
        partitions = {span.root.partition for span in self._chain.spans} | set(self._chain.start)
        ends: dict[int, float] = dict.fromkeys(partitions, -inf)
        windows = list(_windows(self._chain.spans, self._window_rows)) or [[]]
        for number, window in enumerate(windows):
            spans: dict[int, list[Span]] = {}
            for span in window:
                spans.setdefault(span.root.partition, []).append(span)
            is_last, ranges = number == len(windows) - 1, {}
            for partition in sorted(partitions):
                mine = spans.get(partition)
                end = inf if is_last else mine[-1].root.last + 1 if mine else ends[partition]
                if ends[partition] < end:
                    ranges[partition] = ends[partition], end
                ends[partition] = end
            self._check_window(LedgerPart(ranges, others=is_last), spans)
        # A single window is read without a filter, and so completely.
        if len(windows) > 1:
            self._find_unread()
        self.findings += self._statistics.findings
        self.rows = self._statistics.rows
        self._check_counts()

    def _check_window(self, part: LedgerPart, spans: dict[int, list[Span]]) -> None:
        slots = {partition: _Slots(mine) for partition, mine in spans.items()}
        encodings = {span.encoding for mine in spans.values() for span in mine} or {max(ENCODINGS)}
        columns = ENCODINGS[encodings.pop()]
        added: dict[int, list[int]] = {}
        for batch in self._batches(part):
            self._take(batch, columns, slots, added)
        for partition, offsets in sorted(added.items()):
            for first, last in _runs(sorted(offsets)):
                text = f"no commit of the chain has added {offsets_text(partition, first, last)}"
                self.findings.append(Finding(Fault.ROW_ADDED, text, partition, first, last))
        for _, mine in sorted(slots.items()):
            for span in mine.spans:
                self.findings += _check_span(span, mine)

    def _batches(self, part: LedgerPart) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all files. Small batches are joined, because each batch costs time."""
        waiting: list[pa.RecordBatch] = []
        for path in self._files.paths:
            if path in self._unreadable:
                continue
            try:
                for batch in self._rows_of(path, part):
                    waiting.append(batch)
                    if sum(found.num_rows for found in waiting) >= _HASHED_AT_ONCE:
                        yield pa.concat_batches(waiting)
                        waiting = []
            except (OSError, pa.ArrowException, ValueError) as error:
                self._cannot_read(path, error)
        if waiting:
            yield pa.concat_batches(waiting)

    def _find_unread(self) -> None:
        for path in self._files.paths:
            if path not in self._unreadable:
                try:
                    self._statistics.end(path, self._files.row_group_count(path))
                except (OSError, pa.ArrowException) as error:
                    self._cannot_read(path, error)

    def _cannot_read(self, path: str, error: Exception) -> None:
        self._unreadable.add(path)
        reason = str(error).partition("\n")[0] or type(error).__name__
        text = f"a file of the ledger cannot be read: {path}: {reason}"
        self.findings.append(Finding(Fault.FILE_UNREADABLE, text))

    def _rows_of(self, path: str, part: LedgerPart) -> Iterator[pa.RecordBatch]:
        for group in self._files.row_groups(path, part):
            for batch in self._statistics.watched(path, group):
                yield from part.rows_of(batch)

    def _take(
        self,
        batch: pa.RecordBatch,
        columns: Sequence[str],
        slots: dict[int, _Slots],
        added: dict[int, list[int]],
    ) -> None:
        self.rows += batch.num_rows
        self._progress(self.rows)
        if batch.column("partition").null_count or batch.column("offset").null_count:
            self.findings.append(Finding(Fault.ROW_ADDED, "there are rows without partition or offset"))
            placed = pc.and_(batch.column("partition").is_valid(), batch.column("offset").is_valid())
            batch = batch.filter(placed)
        partitions = batch.column("partition").to_numpy(zero_copy_only=False)
        offsets = batch.column("offset").to_numpy(zero_copy_only=False)
        covered = np.zeros(batch.num_rows, dtype=bool)
        present = [int(partition) for partition in np.unique(partitions)]
        for partition in present:
            if partition in slots:
                covered |= (partitions == partition) & slots[partition].covers(offsets)
        self._set_aside(partitions[~covered], offsets[~covered], added)
        if not covered.all():
            batch, partitions, offsets = batch.filter(pa.array(covered)), partitions[covered], offsets[covered]
        found = b"".join(ledger_leaves(batch, columns))
        leaves = np.frombuffer(found, dtype=np.uint8).reshape(-1, HASH_BYTES)
        for partition in present:
            mine = partitions == partition
            if mine.any():
                slots[partition].put(offsets[mine], leaves[mine])

    def _set_aside(self, partitions: Any, offsets: Any, added: dict[int, list[int]]) -> None:
        """Count rows that the chain does not cover: those before its start, and added ones."""
        for partition in (int(found) for found in np.unique(partitions)):
            mine = offsets[partitions == partition]
            beyond = mine[(mine < 0) | (mine >= self._chain.start.get(partition, 0))]
            self.before_the_chain += len(mine) - len(beyond)
            if len(beyond):
                added.setdefault(partition, []).extend(beyond.tolist())

    def _check_counts(self) -> None:
        """Compare the total number of rows with the chain.

        Each offset below the chain's start must have a row, and each entry says how many rows it has added.
        """
        if self.findings:
            return
        older = sum(self._chain.start.values())
        if self.before_the_chain != older:
            text = f"{self.before_the_chain} rows are older than the chain, and there were {older}"
            what = Fault.ROW_MISSING if self.before_the_chain < older else Fault.ROW_ADDED
            self.findings.append(Finding(what, text))
        promised = self.before_the_chain + sum(span.root.rows for span in self._chain.spans)
        if self.rows != promised:
            text = f"the files have {self.rows} rows, and {promised} were settled"
            self.findings.append(Finding(Fault.ROW_MISSING if self.rows < promised else Fault.ROW_ADDED, text))


def _windows(spans: Sequence[Span], most: int) -> Iterator[list[Span]]:
    """Yield groups of successive entries of one encoding, whose offsets fit into `most` slots."""
    window: list[Span] = []
    ends: dict[int, int] = {}
    size = 0
    for span in spans:
        root = span.root
        # Holes between the spans have slots as well.
        cost = root.last + 1 - ends.get(root.partition, root.first)
        if window and (size + cost > most or span.encoding != window[0].encoding):
            yield window
            window, ends, size = [], {}, 0
            cost = root.last + 1 - root.first
        window.append(span)
        ends[root.partition] = root.last + 1
        size += cost
    if window:
        yield window


def _check_span(span: Span, slots: _Slots) -> list[Finding]:
    """Compare one partition's rows of one commit with the chain's entry."""
    root = span.root
    begin, end = root.first - slots.first, root.last + 1 - slots.first
    times = slots.times[begin:end]
    where = f"entry {span.number}, commit {span.version}"

    def finding(what: Fault, text: str, first: int, last: int) -> Finding:
        told = f"{text}: {offsets_text(root.partition, first, last)} ({where})"
        return Finding(what, told, root.partition, first, last, span.number, span.version)

    twice = [int(at) + root.first for at in np.flatnonzero(times > 1)]
    found = [finding(Fault.ROW_TWICE, "there more than once", *run) for run in _runs(twice)]
    present = np.flatnonzero(times)
    if len(present) < root.rows:
        # With holes in Kafka's offsets it is unknown which of them should be rows.
        holes = root.last - root.first + 1 - root.rows
        text = "missing" if holes == 0 else f"{root.rows - len(present)} rows are missing among"
        missing = [int(at) + root.first for at in np.flatnonzero(times == 0)]
        return found + [finding(Fault.ROW_MISSING, text, *run) for run in _runs(missing)]
    if len(present) > root.rows:
        text = f"{len(present) - root.rows} rows too many among"
        return [*found, finding(Fault.ROW_ADDED, text, root.first, root.last)]
    data = slots.leaves[begin:end][present].tobytes()
    leaves = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
    actual, level, covered = root_and_level(leaves, MARKS_MOST)
    if actual.hex() == root.root:
        return found
    runs = _different(level, root.marks) or range(len(level))
    for run in runs:
        inside = present[run * covered : (run + 1) * covered]
        first, last = int(inside[0]) + root.first, int(inside[-1]) + root.first
        found.append(finding(Fault.ROW_CHANGED, "changed" if first == last else "changed among", first, last))
    return found


def _different(level: list[bytes], marks: str) -> list[int]:
    """Return the indexes of the nodes of `level` that have another mark."""
    try:
        known = base64.b64decode(marks, validate=True)
    except ValueError:
        return []
    return [
        at
        for at, node in enumerate(level)
        if node[:MARK_BYTES] != known[at * MARK_BYTES : (at + 1) * MARK_BYTES]
    ]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last number of each run without a gap in rising numbers."""
    if len(numbers):
        found = np.asarray(numbers)
        # Compared, not subtracted: the difference of two offsets of a forged row need not fit into 64 bits.
        breaks = np.flatnonzero((found[1:] != found[:-1]) & (found[1:] != found[:-1] + 1))
        firsts, lasts = [0, *(breaks + 1).tolist()], [*breaks.tolist(), len(numbers) - 1]
        yield from ((numbers[first], numbers[last]) for first, last in zip(firsts, lasts, strict=True))
