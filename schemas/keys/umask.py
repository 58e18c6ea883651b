"""The umask of Trunkline's programs: only the owner may read their files, whatever the user's umask is."""

from __future__ import annotations

import os
from typing import Final

PRIVATE_UMASK: Final = 0o077
# For child processes: the umask of the user who started the first program, in octal digits.
USER_UMASK_VARIABLE: Final = "TRUNKLINE_USER_UMASK"


def keep_files_private() -> None:
    """Set the umask of this process to 077.

    Stores the umask before in an environment variable, where `user_umask` finds it, also in child processes.
    """
    before = os.umask(PRIVATE_UMASK)
    os.environ.setdefault(USER_UMASK_VARIABLE, f"{before:03o}")


def user_umask() -> int:
    """Return the umask for commands that a user configured, or 077 when the user's umask is unknown."""
    try:
        return int(os.environ[USER_UMASK_VARIABLE], 8) & 0o777
    except (KeyError, ValueError):
        return PRIVATE_UMASK
