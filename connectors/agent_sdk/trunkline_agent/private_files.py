"""Files with secrets: create a file once, replace a file, read a file that no other user can read; umask."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from trunkline_agent.errors import UsageError

PRIVATE_UMASK: Final = 0o077
# For child processes: the umask of the user who started the first program, in octal digits.
USER_UMASK_VARIABLE: Final = "TRUNKLINE_USER_UMASK"
_ROOT: Final = 0
_MOUNTED: Final = (
    "a mounted secret must be root's, with mode 0440 or less and a group of this process; in Kubernetes by "
    "defaultMode 0440 and fsGroup"
)


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


class PrivateFileError(UsageError):
    """A file with a secret is open to other users, or this process cannot read it."""


def is_private(mode: int, owner: int, user: int) -> bool:
    """Return whether a file's secret is safe from other users.

    The rule is that of PostgreSQL for key files. The group may read a file of root, because nobody but root can
    have given it to the group. Of any other file only the owner may have rights, also if the user is root.

    Args:
        mode: The mode of the file, such as 0o640.
        owner: The id of the user to whom the file belongs.
        user: The id of the user who reads it.
    """
    return not mode & (0o037 if owner == _ROOT != user else 0o077)


def check_private(path: str | os.PathLike[str], found: os.stat_result | None = None) -> None:
    """Check that no other user can use a file with a secret, by the rule of `is_private`.

    Args:
        path: The file.
        found: The status of the open file. None: ask for it, and check that this process may read the file.

    Raises:
        PrivateFileError: Other users can read, write or execute the file, or this process may not read it.
        OSError: There is no such file, or its status cannot be read.
    """
    if os.name != "posix":
        return
    if found is None:
        found = os.stat(path)  # noqa: PTH116  a path may be a text
        if not os.access(path, os.R_OK):
            raise _denied(path)
    if not is_private(stat.S_IMODE(found.st_mode), found.st_uid, os.geteuid()):
        raise PrivateFileError(
            f"{path} is readable by others ({_shown(found)}; {_MOUNTED})", advice=f"run: chmod 600 {path}"
        )


def open_private(path: str | os.PathLike[str]) -> int:
    """Open a file with a secret to read it, and return the descriptor, which the caller checks and closes.

    Raises:
        PrivateFileError: This process may not read the file.
        OSError: There is no such file, or it cannot be opened for another reason.
    """
    try:
        # Without blocking, because opening a pipe would wait for a writer.
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except PermissionError:
        raise _denied(path) from None


def read_private(path: str | os.PathLike[str], bytes_most: int = -1) -> bytes:
    """Return the content of a file with a secret, or its first `bytes_most` bytes.

    Raises:
        PrivateFileError: Other users can use the file, or this process may not read it.
        OSError: There is no such file, or it cannot be read for another reason.
    """
    with os.fdopen(open_private(path), "rb") as file:
        check_private(path, os.fstat(file.fileno()))
        return file.read(bytes_most)


def _denied(path: str | os.PathLike[str]) -> PrivateFileError:
    try:
        shown = f"{_shown(os.stat(path))}; "  # noqa: PTH116  a path may be a text
    except OSError:
        shown = ""  # its folder cannot be entered
    return PrivateFileError(
        f"{path} cannot be read by this process ({shown}this process is user {os.geteuid()}; {_MOUNTED})",
        advice="run this program as the owner of the file, or give the file to this user: mode 0600",
    )


def _shown(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}, group {found.st_gid}"


def make_first(path: Path, text: str) -> None:
    """Create the file `path` (mode 0600) with the content `text`, synced to disk. Keep an existing file.

    If several programs call it at once, exactly one creates the file. No result says which. The caller
    therefore reads the file to get the valid content. A missing folder is created with mode 0700. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A link does not replace a file, so the first program's file stays.
    with _draft(path, text.encode("utf-8"), 0o600) as draft, suppress(FileExistsError):
        os.link(draft, path)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to the file `path` atomically. By default only its owner can read the file.

    A reader finds the old content or the new one, also after a power cut. `mode` is the mode of the new file.
    Raises OSError, also if the folder does not exist.
    """
    with _draft(path, data, mode) as draft:
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _draft(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Write `data` to a new file beside `path` and sync it. Delete it at the end, unless it was moved."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
