"""Figures of a running stack over time: resident memory of each process, live files of each table.

Figures that are too few to compare are said to be so (`errors`), and are not left out in silence.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
from deltalake import DeltaTable

from connectors.programs.local_stack import LocalStack
from schemas.settings.settings import Settings
from schemas.streams.fold import VIEW_TABLES
from schemas.tables.ledger import LEDGER

# So many files of a table are no burden for a reader: growth counts beyond them.
FEW_FILES: Final = 100
# A process's memory at a moment is the median of the looks within so long.
WINDOW_S: Final = 60.0


@dataclass(frozen=True, order=True)
class Process:
    """A process of a part. `kind` holds what is compared when a process is replaced by another."""

    part: str
    name: str
    pid: int

    @property
    def kind(self) -> str:
        """Its part and its program, such as `streams/java`."""
        return f"{self.part}/{self.name}"


def resident_mb(stack: LocalStack) -> dict[Process, float]:
    """Resident memory of each process of each part: a driver beside its JVM, and every worker."""
    found: dict[Process, float] = {}
    for part_name, part in stack.parts.items():
        if part.pid is None:
            continue
        with suppress(psutil.Error):
            parent = psutil.Process(part.pid)
            for one in [parent, *parent.children(recursive=True)]:
                with suppress(psutil.Error):
                    found[Process(part_name, one.name(), one.pid)] = one.memory_info().rss / 1e6
    return found


def memory_mb(stack: LocalStack) -> dict[str, float]:
    """Resident memory of each part, its processes together."""
    found: dict[str, float] = defaultdict(float)
    for process, held_mb in resident_mb(stack).items():
        found[process.part] += held_mb
    return dict(found)


@dataclass
class MemoryLooks:
    """Looks at the memory of all processes, each at a moment (seconds since the begin)."""

    after_s: float
    looks: list[tuple[float, Mapping[Process, float]]] = field(default_factory=list)

    def add(self, at_s: float, held_mb: Mapping[Process, float]) -> None:
        """One look."""
        self.looks.append((at_s, held_mb))

    def figures(self) -> dict[str, Any]:
        """MB and ratios by kind of process, between `after_s` and the end.

        A kind's ratio is the worst of its processes that were there at both moments, and of their sum, so that
        neither one that grows hides behind others nor one that is replaced by a larger one.
        """
        end_s = self.looks[-1][0] if self.looks else 0.0
        first = self._medians(self.after_s, self.after_s + WINDOW_S)
        last = self._medians(max(end_s - WINDOW_S, self.after_s + WINDOW_S), end_s)
        if not first or not last:
            return {
                "memory_mb": {},
                "memory_ratio": {},
                "memory_worst_ratio": None,
                "errors": [self._void(end_s)],
            }
        sums = [_sums(held) for held in (first, last)]
        ratios = {kind: sums[1][kind] / sums[0][kind] for kind in sums[0].keys() & sums[1].keys()}
        for process in first.keys() & last.keys():
            ratios[process.kind] = max(ratios[process.kind], last[process] / first[process])
        errors = [f"{kind} ran at one of both moments only" for kind in sorted(sums[0].keys() ^ sums[1].keys())]
        return {
            "memory_mb": {
                kind: {"after_10_min": round(sums[0].get(kind, 0)), "last": round(sums[1].get(kind, 0))}
                for kind in sorted(sums[0].keys() | sums[1].keys())
            },
            "memory_ratio": {kind: round(ratio, 3) for kind, ratio in sorted(ratios.items())},
            "memory_worst_ratio": round(max(ratios.values()), 3) if ratios else None,
            "errors": errors,
        }

    def _void(self, end_s: float) -> str:
        return f"memory after {self.after_s:.0f} s cannot be compared with that after {end_s:.0f} s"

    def _medians(self, from_s: float, until_s: float) -> dict[Process, float]:
        """Of processes that were seen in most of the looks of a time."""
        held: dict[Process, list[float]] = defaultdict(list)
        looks = [look for at_s, look in self.looks if from_s <= at_s <= until_s]
        for look in looks:
            for process, value in look.items():
                held[process].append(value)
        return {
            process: statistics.median(values)
            for process, values in held.items()
            if 2 * len(values) > len(looks)
        }


def _sums(held_mb: Mapping[Process, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for process, value in held_mb.items():
        found[process.kind] += value
    return found


class FileLooks:
    """Looks at how many data files the newest version of each table has."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[str, DeltaTable] = {}
        self.looks: list[dict[str, int]] = []

    def add(self) -> dict[str, int]:
        """One look; a table is read anew from its last commit only."""
        found = {}
        for name in (LEDGER, *VIEW_TABLES):
            path = self._settings.table_path(name)
            if name in self._open:
                self._open[name].update_incremental()
            elif DeltaTable.is_deltatable(path):
                self._open[name] = DeltaTable(path)
            if name in self._open:
                found[name] = len(self._open[name].file_uris())
        self.looks.append(found)
        return found

    def figures(self) -> dict[str, dict[str, int]]:
        """The most of the first and of the last third of the looks, and the last, by table."""
        return file_figures(self.looks)


def files_ratio(figures: Mapping[str, Mapping[str, int]]) -> float | None:
    """By how much the table that grew most has more files in the last third than in the first, where fewer than
    FEW_FILES count as so many. None when nothing was looked at.
    """
    grown = [
        max(FEW_FILES, found["most_in_last_third"]) / max(FEW_FILES, found["most_in_first_third"])
        for found in figures.values()
    ]
    return round(max(grown), 3) if grown else None


def file_figures(looks: Sequence[Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Of each table: its most files in the first and in the last third of the looks, and those of the last."""
    if not looks:
        return {}
    third = max(1, len(looks) // 3)
    return {
        table: {
            "most_in_first_third": max((look.get(table, 0) for look in looks[:third]), default=0),
            "most_in_last_third": max(look.get(table, 0) for look in looks[-third:]),
            "last": count,
        }
        for table, count in looks[-1].items()
    }
