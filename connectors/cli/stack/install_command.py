"""Write the systemd units of the stack: one service for each part, and `trunkline.target` for all of them.

Each service runs `trunkline run PART` as the account `trunkline`, which may write to its data directory alone.
Settings come from /etc/trunkline/environment, a file of variables such as TRUNKLINE__GATEWAY__PORT=3300. Each
process of the XML pump has a service; `xml_pump.processes` is read here. Nothing is started; the command prints
how to.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.call import Call
from connectors.cli.stack.up_command import ONLY
from connectors.programs.local_stack import systemd_units
from connectors.programs.local_stack.stack import check_parts, plans_of
from connectors.programs.local_stack.systemd_units import DATA_DIR, TARGET
from trunkline_agent.errors import UsageError

ARGUMENTS = (
    flag("--systemd", "write units for systemd; there is no other way yet"),
    flag("--dry-run", "print the units instead, each after its path"),
    ONLY,
    argument(
        "--user",
        f"the account of the services (default: {systemd_units.USER})",
        metavar="NAME",
        default=systemd_units.USER,
    ),
    argument(
        "--data-dir",
        f"the data directory (default: {systemd_units.DATA_DIR})",
        metavar="DIR",
        type=Path,
        default=systemd_units.DATA_DIR,
        dest="folder",
    ),
    argument(
        "--units",
        "where the units are written (default: /etc/systemd/system)",
        metavar="DIR",
        type=Path,
        default=Path("/etc/systemd/system"),
    ),
)


def run(call: Call) -> int:
    """Write or print the units, and return 0.

    Raises UsageError without `--systemd`, for an unknown part, and for a data directory that is not absolute.
    """
    if not call.systemd:
        raise UsageError("say for what: trunkline install --systemd [--dry-run]")
    if not call.folder.is_absolute():
        raise UsageError(f"--data-dir {call.folder} is not an absolute path")
    parts = check_parts(name.strip() for name in call.only.split(",") if name.strip())
    names = [plan.name for plan in plans_of(call.settings, parts)]
    made = systemd_units.units(names, call.user, call.folder)
    for name, text in made.items():
        path = call.units / name
        if call.dry_run:
            print(f"# {path}\n{text}")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{path}")
    if not call.dry_run:
        folder = shlex.quote(str(call.folder))
        print(f"Once: useradd --system --home-dir {folder} --shell /usr/sbin/nologin {call.user}")
        if not call.folder.is_relative_to(DATA_DIR.parent):
            print(f"      install -d -m 700 -o {call.user} {folder}")
        print(f"Then: systemctl daemon-reload; systemctl enable --now {TARGET}")
    return 0
