"""One check of the kit: its name, what it says, the features that it needs, and its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from connectors.tools.conformance.scene import Scene

FEATURES: Final = (
    "canonical",
    "signing",
    "hub",
    "extend",
    "keeps_leases",
    "ends_long_handlings",
    "ask",
    "topics",
    "handlings",
    "discovery",
    "schedules",
    "blobs",
    "job_http",
    "job_mqtt",
)
_WITHOUT_STACK: Final = {"canonical", "signing"}

Run = Callable[[Scene], None]


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: Its name, which `--only` takes.
        says: One sentence about what must hold.
        needs: The features of the client without which it is not supported.
        run: Runs it in a scene of its own. Raises CheckFailed, ClientRefused or ClientMisbehaved if it fails.
    """

    name: str
    says: str
    needs: frozenset[str]
    run: Run

    @property
    def needs_stack(self) -> bool:
        """True if it needs a live stack."""
        return bool(self.needs - _WITHOUT_STACK)


class Checks(list[Check]):
    """Checks, in the order in which they are shown."""

    def add(self, *needs: str) -> Callable[[Run], Run]:
        """Return a decorator that adds a function as a check, and returns it unchanged.

        The function's name is the name of the check, and the first line of its docstring the sentence.
        """
        unknown = set(needs) - set(FEATURES)
        if unknown:
            raise ValueError(f"no such features: {unknown}")

        def decorate(run: Run) -> Run:
            says = (run.__doc__ or "").partition("\n")[0].rstrip(".")
            self.append(Check(run.__name__, says, frozenset(needs), run))
            return run

        return decorate
