"""The files of the data directory: settings of brokers, bounded logs, failures of the disk, others' rights."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Final

from connectors.programs.local_stack.part_plan import KAFKA, group_of
from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.private_files import replace_file

LIMIT_BYTES = 16 * 1024 * 1024
_BLOCK = 64 * 1024
_RETRY_S = 30.0


def write_from_template(target: Path, values: Mapping[str, object], *templates: str) -> None:
    """Fill in template files of `conf/` and write them, one after the other, as one file with mode 0600.

    The file is replaced, because it may contain a password, and an earlier version's file may be readable by
    others.

    Args:
        target: The file to write.
        values: A value for each `$name` in the templates. A missing one raises KeyError.
        templates: Names of files in `conf/`.
    """
    text = "".join((PROJECT_ROOT / "conf" / name).read_text(encoding="utf-8") for name in templates)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, Template(text).substitute(values).encode())


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a log file without reading all of it. Empty if it cannot be read."""
    try:
        with path.open("rb") as log:
            position = log.seek(0, os.SEEK_END)
            data = b""
            while position > 0 and data.count(b"\n") <= count:
                step = min(_BLOCK, position)
                position = log.seek(position - step)
                data = log.read(step) + data
    except OSError:
        return []
    return data.decode("utf-8", errors="replace").splitlines()[-count:] if count > 0 else []


def keep_bounded(path: Path, limit_bytes: int = LIMIT_BYTES) -> bool:
    """Copy a log that has grown too large to `<name>.1` and empty it. Return whether this call did so.

    An older `<name>.1` is replaced. The program that writes the log keeps it open, so the file stays and is
    cut. Lines that are written between the copy and the cut are lost.

    Args:
        path: The log file. If it is missing, the result is False.
        limit_bytes: A log of at most this size is not changed, and the result is False.

    Raises:
        OSError: The disk has no room for the copy. The log is unchanged then.
    """
    try:
        if path.stat().st_size <= limit_bytes:
            return False
    except OSError:
        return False
    copy = path.with_name(path.name + ".1")
    try:
        shutil.copyfile(path, copy)
    except OSError:
        # An incomplete copy is useless, and takes the last room on a full disk.
        with suppress(OSError):
            copy.unlink(missing_ok=True)
        raise
    os.truncate(path, 0)
    return True


class DiskTrouble:
    """A guard around writes to the disk, so that the supervisor goes on when the disk is full or fails.

        with trouble.tolerated("the state file"):
            write_state(settings, state)

    Args:
        retry_s: How long `is_due` returns False after a failure, in seconds.
    """

    def __init__(self, retry_s: float = _RETRY_S) -> None:
        self._retry_s = retry_s
        self._failed_at: dict[str, float] = {}

    def is_due(self, what: str) -> bool:
        """Return whether to try a write now. After a failure it is False for `retry_s` seconds.

        `what` is the name of the write that was given to `tolerated`.
        """
        failed_at = self._failed_at.get(what)
        return failed_at is None or time.monotonic() - failed_at >= self._retry_s

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Run the `with` block, and continue after it if it raises OSError.

        The error is printed to stdout. Further errors of blocks with the same `what` are not printed until one
        of these blocks has succeeded.

        Args:
            what: A name of the write, for the message and for `is_due`.
        """
        try:
            yield
        except OSError as error:
            if what not in self._failed_at:
                # The log that this is printed to may be on the same disk.
                with suppress(OSError):
                    print(f"{what}: {error}; going on without", flush=True)
            self._failed_at[what] = time.monotonic()
        else:
            self._failed_at.pop(what, None)


# The names that Trunkline creates in a data directory, and `kafka_2` of a further node. Nothing else
# is touched: `data_dir` may be set to a folder with other files.
OUR_NAMES: Final = frozenset(
    {
        "agent_keys",
        "agents",
        "anchors",
        "audit",
        "checkpoints",
        "export",
        "file_bridge",
        "job-secrets",
        "jobs",
        "kafka",
        "kafka-cluster.json",
        "keys",
        "listener_schemas",
        "logs",
        "mosquitto",
        "publisher",
        "queue",
        "run",
        "sessions",
        "spark-scratch",
        "state",
        "tables",
        "warehouse",
        "xml_pump",
    }
)
# All versions created these files private. A user has opened one that is not.
_SECRETS: Final = frozenset({"agent_keys", "job-secrets", "keys"})
_PUBLIC_SUFFIXES: Final = (".crt", ".pub")
_FOR_OTHERS: Final = 0o077
_NAMED: Final = 3


@dataclass
class OpenData:
    """Files and folders below a data directory that other users can open.

    Attributes:
        folders: The folders. `find_open` with `close` has made them private.
        files: The files. `find_open` with `close` has made them private.
        left: Paths that stay open: those of another user; the data directory itself, if it has other files,
            too; and secrets. A program refuses a secret that others may have read, and says so.
    """

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{len(self.files)} files and {len(self.folders)} folders"


def find_open(root: Path, *, close: bool = False) -> OpenData:
    """Return the files and folders below the data directory `root` that other users can open.

    Only files and folders with names that Trunkline creates (OUR_NAMES) are looked at. Links are not followed.
    The call is safe while programs of the same user run.

    Args:
        root: The data directory.
        close: True: remove the rights of group and others from the found paths, except from those in `left`.
            False: change nothing.

    Raises:
        OSError: One of Trunkline's folders cannot be read, or a mode cannot be changed.
    """
    found = OpenData()
    for path, status in _ours(root, found):
        mode = stat.S_IMODE(status.st_mode)
        if not mode & _FOR_OTHERS:
            continue
        if stat.S_ISREG(status.st_mode) and _is_secret(root, path):
            found.left.append(path)
            continue
        if close:
            try:
                # The folder above it is closed already, so no other user can put a link here meanwhile.
                Path(path).chmod(mode & ~_FOR_OTHERS)
            except FileNotFoundError:
                continue
        (found.folders if stat.S_ISDIR(status.st_mode) else found.files).append(path)
    return found


def describe_repair(root: Path, closed: OpenData) -> list[str]:
    """Return lines of text for the user about the paths that `find_open` has made private or left open.

    The list is empty if there were no such paths.

    Args:
        root: The data directory.
        closed: The result of `find_open` with `close`.
    """
    lines = []
    if closed.files or closed.folders:
        lines.append(f"Other users could open {closed} in {root}: now only you can")
    if closed.left:
        lines.append(f"Left as it is, and not private: {named(closed.left)}")
    return lines


def named(paths: list[str]) -> str:
    """Return the first three paths as one text, with the number of the others."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _is_secret(root: Path, path: str) -> bool:
    name = path.removeprefix(f"{root}/").partition("/")[0]
    return name in _SECRETS and not path.endswith(_PUBLIC_SUFFIXES)


def _is_ours(name: str) -> bool:
    return name in OUR_NAMES or group_of(name) == KAFKA


def _ours(root: Path, found: OpenData) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the root and what is below it, each folder before it is read. Fill in `found.left`."""
    me = os.geteuid()
    for folder, folders, files in os.walk(root, onerror=_raise_unless_missing):
        names = [*folders, *files]
        if folder == str(root):
            status = root.stat()
            if status.st_uid == me and all(map(_is_ours, names)):
                yield folder, status
            elif stat.S_IMODE(status.st_mode) & _FOR_OTHERS:
                found.left.append(folder)
            names = [name for name in names if _is_ours(name)]
        folders.clear()
        for name in names:
            path = f"{folder}/{name}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISLNK(status.st_mode):
                continue
            if status.st_uid != me:
                found.left.append(path)
                continue
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                folders.append(name)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
