"""File modes below a folder, and what another user of the machine can open there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

# Only root can become another user. CI is root: there what needs it fails rather than being left out.
CAN_BECOME_ANOTHER_USER = os.geteuid() == 0 or bool(os.environ.get("CI"))
# "nobody" of Debian, and of most systems.
OTHER_UID = 65534
# Run as the other user: prints each path that can be opened, and each folder that can be listed.
_OPEN_ALL = """
import os, sys
os.setgroups([]); os.setgid(%(uid)d); os.setuid(%(uid)d)
for path in sys.stdin.buffer.read().split(b"\\0"):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        continue
    print(os.fsdecode(path))
"""


def paths_below(root: Path) -> list[Path]:
    """The folder itself and all that is below it, links not followed."""
    found = [root]
    for folder, folders, files in os.walk(root):
        found += [Path(folder, name) for name in (*folders, *files)]
    return found


def open_to_others(root: Path) -> list[str]:
    """The paths that belong to `root`'s owner and whose mode gives rights to group or others, with the mode."""
    found = []
    for path in paths_below(root):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISLNK(mode) and mode & 0o077:
            found.append(f"{stat.S_IMODE(mode):o} {path.relative_to(root)}")
    return found


def opened_by_another_user(paths: list[Path]) -> list[str]:
    """Return those of the paths that uid 65534 can open. Needs root."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _OPEN_ALL % {"uid": OTHER_UID}],
        input=b"\0".join(os.fsencode(path) for path in paths),
        capture_output=True,
        timeout=60,
        check=True,
    )
    return done.stdout.decode().splitlines()
