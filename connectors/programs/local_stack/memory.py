"""The memory that a stack needs and may use, and processes that the kernel killed because there was none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from connectors.programs.local_stack.part_plan import (
    ALL_PARTS,
    BRIDGE,
    FILES,
    GATEWAY,
    KAFKA,
    MOSQUITTO,
    STREAMS,
    XML_PUMP,
    group_of,
)

MIB: Final = 2**20
PAGE: Final = "docs/how-to/run_the_stack.md#memory"
# The memory of each part in use with the settings' defaults, in MiB: what it took at rest (PSS), and some for
# messages of 100 kB. Larger bodies and many clients take more.
NEEDS_MIB: Final = {
    KAFKA: 380,
    MOSQUITTO: 20,
    BRIDGE: 70,
    FILES: 90,
    GATEWAY: 220,
    XML_PUMP: 50,
    STREAMS: 1110,
}
_CGROUPS: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 2**60
# The supervisor looks at the counter once a second, and at an ended part within a tenth of a second.
_LOOK_S: Final = 1.0
_RECENT_S: Final = 5.0


def cgroup_folders(proc: Path = Path("/proc/self"), root: Path = _CGROUPS) -> Iterator[Path]:
    """Yield the folders with the memory limits of this process: that of its cgroup, then those of its parents.

    In a container the path of the cgroup may be the host's, which does not exist below `root`. The limits are
    then in `root` itself.
    """
    for line in (proc / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "memory" if controllers else root
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder


def memory_limit(proc: Path = Path("/proc/self"), root: Path = _CGROUPS) -> int | None:
    """Return how many bytes this process and its children may use by its cgroups (v1 or v2); None: no limit."""
    found = []
    for folder in cgroup_folders(proc, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # `max`
                found.append(int((folder / name).read_text(encoding="ascii")))
    limit = min(found, default=_NO_LIMIT)
    return limit if limit < _NO_LIMIT else None


def oom_kills(proc: Path = Path("/proc/self"), root: Path = _CGROUPS) -> int | None:
    """Return how many processes of this cgroup the kernel killed for memory; None if it does not say."""
    for folder in cgroup_folders(proc, root):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError):
                for line in (folder / name).read_text(encoding="ascii").splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
    return None


class OomKills:
    """Watches the kernel's counter of processes that it killed for memory. Not thread-safe.

    Args:
        count: Returns the counter.
    """

    def __init__(self, count: Callable[[], int | None] = oom_kills) -> None:
        self._count = count
        self._seen: int | None = None
        self._looked_at = self._rose_at = -_RECENT_S

    def look(self) -> None:
        """Read the counter, at most once a second, so that `are_recent` notices later when it rises.

        The supervisor calls this in its loop.
        """
        if time.monotonic() - self._looked_at >= _LOOK_S:
            self.are_recent()

    def are_recent(self) -> bool:
        """Return whether the counter rose in the last five seconds."""
        now = time.monotonic()
        with suppress(OSError):
            found = self._count()
            if self._seen is not None and found is not None and found > self._seen:
                self._rose_at = now
            self._seen, self._looked_at = found, now
        return now - self._rose_at < _RECENT_S


KILLS: Final = OomKills()


def needed_mib(parts: Iterable[str]) -> int:
    """Return the memory that these parts of a stack take in use, in MiB. A part may be a further node, too."""
    return sum(NEEDS_MIB.get(group_of(name), 0) for name in set(parts))


def shortage(parts: Iterable[str] = ALL_PARTS, in_use: int = 0) -> str | None:
    """Return a text about too little memory for these parts, None if there is enough.

    Args:
        parts: The names of the parts.
        in_use: The bytes that parts of this stack use already.
    """
    needed = needed_mib(parts)
    limit = memory_limit()
    if limit is not None and limit < needed * MIB:
        return f"these parts need about {needed} MiB, and the cgroup allows {limit // MIB} MiB"
    free = psutil.virtual_memory().available + in_use
    if free < needed * MIB:
        return f"these parts need about {needed} MiB, and this machine has {free // MIB} MiB left"
    return None
