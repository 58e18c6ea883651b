"""Named points in real programs at which a test wants them to die: armed by a file, from outside, at any time.

A test arms a point by `arm`: the `nth` time that a process of the seed comes there after that, it renames the
file, so that nobody else does the same, and kills itself with SIGKILL. Production code knows nothing of this:
`crashing_program.py` and `crashing_streams.py` wrap its functions.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "TRUNKLINE_PROVE_POINTS"
_FIRED, _FRESH = ".fired", ".new"


def arm(folder: Path, point: str, nth: int = 1) -> None:
    """Let the nth coming to a point (`part.name`) be the last."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{point}{_FRESH}"
    fresh.write_text(str(nth))
    fresh.rename(folder / point)


def disarm(folder: Path, but: Sequence[str] = ()) -> None:
    """Nobody dies any more, `but` processes of these parts."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.suffix != _FIRED and path.name.partition(".")[0] not in but:
            path.unlink(missing_ok=True)


def is_armed(folder: Path, prefix: str) -> bool:
    """True if somebody is to die at a point (`part.name`) that begins so."""
    return any(path.suffix not in (_FIRED, _FRESH) for path in folder.glob(f"{prefix}*"))


def fired(folder: Path, point: str) -> bool:
    """True if somebody died there."""
    return (folder / f"{point}{_FIRED}").exists()


class Points:
    """The points of one process, whose part has this name."""

    def __init__(self, part: str, *, with_parent: bool = False) -> None:
        self._folder = Path(os.environ[FOLDER_VARIABLE])
        self._part = part
        self._with_parent = with_parent
        self._hits: Counter[str] = Counter()

    def is_armed(self, name: str) -> bool:
        """True if the process is to die there, at this or a later coming."""
        return (self._folder / f"{self._part}.{name}").exists()

    def hit(self, name: str) -> None:
        """The process has come to a point. Costs a look at the file system."""
        path = self._folder / f"{self._part}.{name}"
        try:
            wanted = int(path.read_text())
        except (FileNotFoundError, ValueError):
            return
        self._hits[name] += 1
        if self._hits[name] >= wanted:
            self.die(name)

    def die(self, name: str) -> None:
        """Die there now, with nothing flushed or closed, if nobody else did so before."""
        path = self._folder / f"{self._part}.{name}"
        try:
            path.rename(f"{path}{_FIRED}")
        except FileNotFoundError:
            return
        if self._with_parent:
            # The JVM around a driver.
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
