"""The results of seeds in a file, one JSON line a seed: a later run goes on where this one ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.prove.comparison import KINDS


class Results:
    """The file and what stands in it. A line that was cut off counts as none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[int, dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        # What follows a line that was cut off begins a line of its own.
        self._needs_end = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                found = json.loads(line)
                self._lines[int(found["seed"])] = found
            except (ValueError, KeyError, TypeError):
                continue

    def has(self, seed: int) -> bool:
        """Whether the seed was run to its end."""
        return seed in self._lines

    def add(self, line: dict[str, Any]) -> None:
        """Append a seed's result."""
        self._lines[line["seed"]] = line
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(("\n" if self._needs_end else "") + json.dumps(line) + "\n")
        self._needs_end = False

    def of(self, seeds: Iterable[int]) -> list[dict[str, Any]]:
        """The results of these seeds, as far as there are."""
        return [self._lines[seed] for seed in seeds if seed in self._lines]


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `--json` prints: seeds and acknowledgements, findings of each kind, faults by name."""
    kinds = Counter(finding["kind"] for line in lines for finding in line["findings"])
    faults: Counter[str] = Counter()
    for line in lines:
        faults.update(line["faults"])
    return {
        "seeds": len(lines),
        "acknowledged": sum(line["acknowledged"] for line in lines),
        **{kind: kinds[kind] for kind in KINDS},
        "faults": dict(sorted(faults.items())),
    }
