"""The colours of a terminal. Untrusted text is made safe by `trunkline_agent.terminal_text` (CM-06)."""

from __future__ import annotations

import os
import sys


def is_coloured() -> bool:
    """Return whether to use colours: standard output is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
