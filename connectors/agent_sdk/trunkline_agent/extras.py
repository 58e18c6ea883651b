"""The optional parts of the library, and the error for a part whose libraries are not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from trunkline_agent.errors import UsageError

DISTRIBUTION: Final = "trunkline-agent"
EXTRAS: Final = {
    "mqtt": {"paho": "paho-mqtt"},
    "mcp": {"cryptography": "cryptography", "httpx2": "httpx2", "mcp": "mcp"},
    "xml": {"lxml": "lxml"},
}
"""For each extra, the modules that it needs, with the distributions that have them."""


class MissingExtra(UsageError, ImportError):
    """A part of the library was imported whose libraries are not installed.

    Attributes:
        extra: The extra to install, such as `mqtt`.
    """

    reason = "missing_extra"

    def __init__(self, extra: str, distributions: list[str]) -> None:
        super().__init__(
            f"trunkline_agent.{extra} needs {', '.join(distributions)}, not installed here",
            advice=f"install the extra '{extra}': pip install '{DISTRIBUTION}[{extra}]'",
        )
        self.extra = extra


def require_extra(extra: str) -> None:
    """Check that the libraries of an extra, one of `EXTRAS`, are installed.

    The package of the extra calls this before it imports them. Nothing is imported by the check.

    Raises:
        MissingExtra: One of them is not installed. The advice says how to install the extra.
    """
    missing = [distribution for module, distribution in EXTRAS[extra].items() if find_spec(module) is None]
    if missing:
        raise MissingExtra(extra, missing)
