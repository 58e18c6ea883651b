"""Keeps the data directory private: finds files that other users can open, and removes their rights."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

# The names that Trunkline creates in a data directory. Nothing else is touched: `data_dir` may be set to a
# folder with other files.
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


def _ours(root: Path, found: OpenData) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the root and what is below it, each folder before it is read. Fill in `found.left`."""
    me = os.geteuid()
    for folder, folders, files in os.walk(root, onerror=_raise_unless_missing):
        names = [*folders, *files]
        if folder == str(root):
            status = root.stat()
            if status.st_uid == me and OUR_NAMES.issuperset(names):
                yield folder, status
            elif stat.S_IMODE(status.st_mode) & _FOR_OTHERS:
                found.left.append(folder)
            names = [name for name in names if name in OUR_NAMES]
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
