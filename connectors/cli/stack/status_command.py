"""Show each part of the local stack: state, process, age, memory with all that it started, restarts.

Exit code 0 if a stack runs and all its parts are ready, else 1.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from connectors.local_stack import control
from connectors.local_stack.control import PartStatus
from connectors.terminal.terminal_text import escaped
from schemas.settings.kafka_settings import missing_login
from schemas.settings.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def age_text(seconds: float | None) -> str:
    """An age in its two largest units: `3d 4h`, `2m 5s`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    units = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    while len(units) > 1 and units[0][0] == 0:
        units.pop(0)
    return " ".join(f"{count}{unit}" for count, unit in units[:2])


def _table(parts: list[PartStatus]) -> str:
    rows = [("PART", "STATE", "PID", "UP", "RSS MB", "RESTARTS", "")]
    for p in parts:
        rss = "-" if p.rss_mb is None else f"{p.rss_mb:.0f}"
        rows.append((p.name, p.state, str(p.pid or "-"), age_text(p.uptime_s), rss, str(p.restarts), p.summary))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print it."""
    state = control.running_state(settings)
    parts = control.part_statuses(settings)
    chosen = state["parts"] if state else {}
    well = bool(chosen) and all(p.state == "ready" for p in parts if p.name in chosen)
    unsafe = missing_login(settings.kafka.security_protocol, settings.kafka.ssl_certfile)
    if args.json:
        phase = state["phase"] if state else "stopped"
        found = {
            "phase": phase,
            "data_dir": str(settings.data_path),
            "parts": [asdict(p) for p in parts],
            "unsafe": [unsafe] if unsafe else [],
        }
        print(json.dumps(found))
        return 0 if well else 1
    print(_table(parts))
    if unsafe:
        print(f"Unsafe: {unsafe}")
    for part in parts:
        if part.why is not None:
            print(f"{part.name}: {escaped(part.why)} (trunkline logs {part.name})")
    if state is None:
        left = [p.name for p in parts if p.pid]
        print(
            f"The supervisor is gone, {', '.join(left)} left: trunkline down"
            if left
            else "Start it: trunkline up"
        )
    return 0 if well else 1
