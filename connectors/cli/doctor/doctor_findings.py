"""A finding of `trunkline doctor`: what was looked at, whether it is well, how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"
START = "start it: trunkline up"
RESTART = "see trunkline logs; then trunkline down and trunkline up"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    check: str
    level: str
    found: str
    mend: str = ""


def private_file(check: str, path: Path) -> Finding:
    """A file that exists and must be for its owner alone."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Finding(check, FAIL, f"{path} can be read by others (mode {mode:o})", f"chmod 600 {path}")
    return Finding(check, OK, f"{path}, mode {mode:o}")
