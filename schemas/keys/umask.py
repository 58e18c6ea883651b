"""The umask of Trunkline's programs: what they write is for its owner alone, whatever the user's umask is."""

from __future__ import annotations

import os
from typing import Final

PRIVATE_UMASK: Final = 0o077
# For the programs that we start: the umask of the user who started the first of them, in octal digits.
USER_UMASK_VARIABLE: Final = "TRUNKLINE_USER_UMASK"


def keep_files_private() -> None:
    """Set the process's umask to 077, and leave the one before to `user_umask`, also of child processes."""
    before = os.umask(PRIVATE_UMASK)
    os.environ.setdefault(USER_UMASK_VARIABLE, f"{before:03o}")


def user_umask() -> int:
    """Return the umask for commands that a user gave us to run; 077 when the user's is not known."""
    try:
        return int(os.environ[USER_UMASK_VARIABLE], 8) & 0o777
    except (KeyError, ValueError):
        return PRIVATE_UMASK
