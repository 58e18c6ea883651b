"""The results of seeds in a file, one JSON line a seed: a later run goes on where this one ended.

A result is of the programs that it was found with. With others, or where anything was found, a seed is run
again; what was found before stays in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from schemas.settings.settings import PROJECT_ROOT
from tests.faults.prove.comparison import KINDS
from tests.faults.prove.schedule import ALL_FAULTS

# The files that a seed's run depends on: our programs, their dependencies and settings, the faults, and the
# modules of other tests that the faults use.
_PROGRAMS: Final = (
    *("connectors", "jobs", "schemas", "conf", "requirements.lock"),
    *("tests/faults", "tests/broker_processes.py", "tests/connectors/doors/http_api/hub_stack.py"),
    *("tests/connectors/doors/xml_pump/pump_handlers.py", "tests/connectors/doors/xml_pump/pump_stack.py"),
    *("tests/raw_records.py", "tests/schemas/stream_records.py", "tests/schemas/hub_records.py"),
    *("tests/schemas/job_records.py", "tests/failing_outputs.py", "tests/slow_readers.py"),
)


def programs_hash(root: Path = PROJECT_ROOT) -> str:
    """The version of the programs: a hash over their files, committed or not."""
    found = hashlib.sha256()
    for name in _PROGRAMS:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if not file.is_file() or file.suffix == ".pyc":
                continue
            found.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:12]


class Results:
    """The file and what stands in it. A line that was cut off counts as none. `programs`: which run now."""

    def __init__(self, path: Path, programs: str) -> None:
        self._path, self._programs = path, programs
        self._lines: dict[int, dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        # After a line that was cut off, the next result must begin on a new line.
        self._needs_end = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                found = json.loads(line)
                self._lines[int(found["seed"])] = found
            except (ValueError, KeyError, TypeError):
                continue

    def has(self, seed: int) -> bool:
        """True if these programs ran the seed to its end and nothing was found."""
        found = self._of_these(seed)
        return found is not None and not found["findings"]

    def _of_these(self, seed: int) -> dict[str, Any] | None:
        found = self._lines.get(seed)
        return found if found is not None and found.get("programs") == self._programs else None

    def add(self, line: dict[str, Any]) -> None:
        """Append a seed's result."""
        line = {**line, "programs": self._programs}
        self._lines[line["seed"]] = line
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(("\n" if self._needs_end else "") + json.dumps(line) + "\n")
        self._needs_end = False

    def of(self, seeds: Iterable[int]) -> list[dict[str, Any]]:
        """The results of these seeds with these programs, as far as there are."""
        return [line for seed in seeds if (line := self._of_these(seed)) is not None]


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the output of `--json`: seeds and acknowledgements, findings of each kind, faults by name.

    `deliveries`: what consumers, askers and followers did and got. `unjudged`: seeds that do not tell what was
    lost: they did not come to rest, or were not run as drawn. `not_injected`: faults that none of them met: not
    drawn, or a point that nobody came to.
    """
    kinds = Counter(finding["kind"] for line in lines for finding in line["findings"])
    faults: Counter[str] = Counter()
    deliveries: Counter[str] = Counter()
    for line in lines:
        faults.update(line["faults"])
        deliveries.update(line.get("deliveries", {}))
    return {
        "seeds": len(lines),
        "acknowledged": sum(line["acknowledged"] for line in lines),
        **{kind: kinds[kind] for kind in KINDS},
        "unjudged": sum(not line["is_judged"] for line in lines),
        "deliveries": dict(sorted(deliveries.items())),
        "faults": dict(sorted(faults.items())),
        "not_injected": [name for name in ALL_FAULTS if not faults[name]],
    }
