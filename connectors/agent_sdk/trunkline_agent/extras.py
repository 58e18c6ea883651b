"""The optional parts of the library, and the error for a part whose libraries are not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

DISTRIBUTION: Final = "trunkline-agent"
EXTRAS: Final = {
    "mqtt": {"paho": "paho-mqtt"},
    "mcp": {"cryptography": "cryptography", "httpx2": "httpx2", "mcp": "mcp"},
    "xml": {"lxml": "lxml"},
}
"""For each extra, the modules that it needs, with the distributions that have them."""


class MissingExtra(ImportError):
    """A part of the library was imported whose libraries are not installed.

    Attributes:
        extra: The extra to install, such as `mqtt`.
    """

    def __init__(self, extra: str, distributions: list[str]) -> None:
        super().__init__(
            f"trunkline_agent.{extra} needs {', '.join(distributions)}, not installed here. "
            f"Install the extra '{extra}': pip install '{DISTRIBUTION}[{extra}]'",
            name=f"trunkline_agent.{extra}",
        )
        self.extra, self._distributions = extra, distributions

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, list[str]]]:
        return MissingExtra, (self.extra, self._distributions)


def missing_distributions(extra: str) -> list[str]:
    """Return the distributions of an extra, one of `EXTRAS`, that are not installed."""
    return [distribution for module, distribution in EXTRAS[extra].items() if find_spec(module) is None]


def require_extra(extra: str) -> None:
    """Check that the libraries of an extra, one of `EXTRAS`, are installed.

    The package of the extra calls this before it imports them. Nothing is imported by the check.

    Raises:
        MissingExtra: One of them is not installed. The text names the extra and how to install it.
    """
    missing = missing_distributions(extra)
    if missing:
        raise MissingExtra(extra, missing)
