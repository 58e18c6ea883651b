"""Display untrusted text on a terminal without executing its control sequences (CM-06).

The library of agents has `escaped`, because its errors and its command need it, too.
"""

from __future__ import annotations

import os
import sys

from trunkline_agent.terminal_text import escaped

__all__ = ["escaped", "is_coloured"]


def is_coloured() -> bool:
    """Return whether to use colours: standard output is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
