"""Findings of `trunkline doctor`, and the tables of checks that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path

from connectors.local_stack import control
from schemas.settings.settings import Settings

OK, WARN, FAIL = "ok", "warn", "fail"
START = "start it: trunkline up"
RESTART = "see trunkline logs; then trunkline down and trunkline up"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `mend` says how to repair what is wrong; it is empty if nothing is."""

    check: str
    level: str
    found: str
    mend: str = ""


Check = Callable[[Settings], Finding]
"""Checks one thing. A TrunklineError, SettingsError or OSError that it raises counts as a failure."""


class Checks(dict[str, Check]):
    """The checks of a module by name, in the order of the report."""

    def add(self, name: str) -> Callable[[Check], Check]:
        """Return a decorator that adds a check and sets the name of its findings."""

        def decorate(check: Check) -> Check:
            @wraps(check)
            def named(settings: Settings) -> Finding:
                return replace(check(settings), check=name)

            self[name] = named
            return named

        return decorate


def ok(found: str) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding("", OK, found)


def warn(found: str, mend: str = "") -> Finding:
    """Return a finding that does not fail the doctor, such as a part that is not started."""
    return Finding("", WARN, found, mend)


def fail(found: str, mend: str = "") -> Finding:
    """Return a finding that fails the doctor."""
    return Finding("", FAIL, found, mend)


def private_file(path: Path) -> Finding:
    """Check that only the owner can read an existing file."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return fail(f"{path} can be read by others (mode {mode:o})", f"chmod 600 {path}")
    return ok(f"{path}, mode {mode:o}")


def is_started(settings: Settings, part: str) -> bool:
    """Return whether the stack that runs on this data directory has this part."""
    state = control.running_state(settings)
    return state is not None and part in state["parts"]
