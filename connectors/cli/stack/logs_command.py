"""Show the logs of the local stack's parts, each line after the part's name; `-f` follows them.

The second XML pump and those after it have their number in their names: xml_pump_2.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from connectors.cli.shared.actions import Argument, argument
from connectors.cli.shared.call import Call
from connectors.programs.local_stack.data_files import last_lines
from connectors.programs.local_stack.part_plan import ALL_PARTS, group_of
from trunkline_agent.errors import NotFound, UsageError

_SUPERVISOR = "supervisor"
_POLL_S = 0.3


_NAMES = ", ".join((*ALL_PARTS, _SUPERVISOR))
ARGUMENTS: Final[tuple[Argument, ...]] = (
    argument("part", f"one of {_NAMES} (default: all)", nargs="?", metavar="part"),
    argument("-n", "lines from the end (default: 20)", type=int, default=20, metavar="LINES"),
    lambda parser: parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C"),
)


def _print(name: str, lines: list[str], prefixed: bool) -> None:
    for line in lines:
        print(f"{name:<10} | {line}" if prefixed else line, flush=True)


def _follow(logs: dict[str, Path], prefixed: bool) -> None:
    offsets = {name: path.stat().st_size if path.exists() else 0 for name, path in logs.items()}
    while True:
        for name, path in logs.items():
            size = path.stat().st_size if path.exists() else 0
            if size < offsets[name]:
                # The file was cut because it had grown too large.
                offsets[name] = 0
            if size == offsets[name]:
                continue
            with path.open("rb") as log:
                log.seek(offsets[name])
                data = log.read()
            complete = data[: data.rfind(b"\n") + 1]
            offsets[name] += len(complete)
            _print(name, complete.decode("utf-8", errors="replace").splitlines(), prefixed)
        time.sleep(_POLL_S)


def run(call: Call) -> int:
    """Print the last lines of the parts' log files, and with `--follow` new lines until Ctrl-C. Return 0.

    Raises UsageError for an unknown part, and NotFound if there are no log files and `--follow` is not given.
    """
    folder = call.settings.data_path / "logs"
    numbered = (path.stem for path in folder.glob("*_*.log") if path.stem not in ALL_PARTS)
    more = sorted((one for one in numbered if group_of(one) in ALL_PARTS), key=lambda name: (len(name), name))
    names = (*ALL_PARTS, *more, _SUPERVISOR)
    if call.part is not None and call.part not in names:
        raise UsageError(f"no such part: {call.part}; there are {', '.join(names)}")
    logs = {name: folder / f"{name}.log" for name in ([call.part] if call.part else names)}
    if not call.follow and not any(path.exists() for path in logs.values()):
        raise NotFound(f"no logs in {folder}: nothing was started with these settings (trunkline up)")
    prefixed = call.part is None
    for name, path in logs.items():
        _print(name, last_lines(path, call.n), prefixed)
    if call.follow:
        _follow(logs, prefixed)
    return 0
