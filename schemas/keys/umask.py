"""The umask of Trunkline's programs: only the owner may read their files, whatever the user's umask is."""

from __future__ import annotations

import os
from typing import Final

PRIVATE_UMASK: Final = 0o077
# For child processes: the umask of the user who started the first program, in octal digits.
USER_UMASK_VARIABLE: Final = "TRUNKLINE_USER_UMASK"


def keep_files_private() -> None:
    """Set the umask of this process to 077, so that only the owner can read files that it creates.

    The umask before is stored in the environment variable `TRUNKLINE_USER_UMASK`, unless the variable is set
    already. `user_umask` reads the variable, also in child processes.
    """
    before = os.umask(PRIVATE_UMASK)
    os.environ.setdefault(USER_UMASK_VARIABLE, f"{before:03o}")


def user_umask() -> int:
    """Return the user's own umask, for child processes that run commands which the user configured.

    It is the umask before the first call of `keep_files_private`, in this process or the one that started it.
    If that is unknown, the result is 077.
    """
    try:
        return int(os.environ[USER_UMASK_VARIABLE], 8) & 0o777
    except (KeyError, ValueError):
        return PRIVATE_UMASK
