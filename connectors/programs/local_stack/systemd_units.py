"""The systemd units that run the parts of the stack, one service for each, and the account that they run as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Final

from connectors.programs.local_stack.part_plan import (
    GATEWAY,
    KAFKA,
    MOSQUITTO,
    START_WITHOUT_KAFKA,
    STREAMS,
    group_of,
)
from schemas.settings.settings import PROJECT_ROOT

USER: Final = "trunkline"
DATA_DIR: Final = Path("/var/lib/trunkline")
TARGET: Final = "trunkline.target"
_STATE: Final = Path("/var/lib")


def unit_name(part: str) -> str:
    """Return the name of a part's service, such as `trunkline-xml-pump.service`."""
    return f"trunkline-{part.replace('_', '-')}.service"


def units(parts: Iterable[str], user: str = USER, data_dir: Path = DATA_DIR) -> Mapping[str, str]:
    """Return the text of each unit by its file name: the services of these parts, and `trunkline.target`.

    Args:
        parts: Names of parts, in the order of their start, such as `kafka` and its second node `kafka_2`.
        user: The account of the services.
        data_dir: The data directory. Below `/var/lib` systemd makes it, for this account alone.
    """
    parts = tuple(parts)
    return {unit_name(part): _service(part, parts, user, data_dir) for part in parts} | {TARGET: _target(parts)}


def _service(part: str, parts: tuple[str, ...], user: str, data_dir: Path) -> str:
    group = group_of(part)
    first = [one for one in parts if group_of(one) in START_WITHOUT_KAFKA and group not in START_WITHOUT_KAFKA]
    variables = {"TRUNKLINE__DATA_DIR": data_dir}
    if MOSQUITTO in parts:
        variables["TRUNKLINE__MQTT__ACCOUNTS_DIR"] = data_dir / "mosquitto" / "accounts"
    values = {
        "unit": unit_name(part),
        "part": part,
        "root": _escaped(str(PROJECT_ROOT)),
        "command": f"{_quoted(str(PROJECT_ROOT / 'trunkline'))} run {part}",
        "after": "".join(f" {unit_name(one)}" for one in first),
        # Agents outlive the gateway that has started them.
        "kill_mode": "process" if part == GATEWAY else "mixed",
        "user": user,
        "folder": _folder(data_dir),
        "environment": "\n".join(f"Environment={_quoted(f'{name}={one}')}" for name, one in variables.items()),
        # Java compiles while it runs, and so do many agents, which have the rules of the gateway.
        "no_new_code": "no" if group in (KAFKA, STREAMS, GATEWAY) else "yes",
    }
    template = (PROJECT_ROOT / "conf" / "part.service").read_text(encoding="utf-8")
    return Template(template).substitute(values)


def _folder(data_dir: Path) -> str:
    """Return the lines that let a service write to the data directory alone."""
    below = data_dir.relative_to(_STATE).parts if data_dir.is_relative_to(_STATE) else ()
    # A colon would make a link (systemd.exec(5)).
    if below and ".." not in below and ":" not in str(data_dir):
        return f"StateDirectory={_quoted('/'.join(below))}\nStateDirectoryMode=0700"
    return f"ReadWritePaths={_quoted(str(data_dir))}"


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """Return a word as systemd reads it (systemd.syntax(7))."""
    return '"' + _escaped(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _target(parts: tuple[str, ...]) -> str:
    wanted = " ".join(map(unit_name, parts))
    return (
        "# Made by `trunkline install --systemd`.\n[Unit]\nDescription=Trunkline\n"
        f"Wants={wanted}\n\n[Install]\nWantedBy=multi-user.target\n"
    )
