"""Show each part of the local stack: state, process, age, memory with its child processes, restarts.

Exit code 0 if a stack runs and all its parts are ready, else 1.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call
from connectors.cli.shared.text_output import aligned
from connectors.programs.local_stack import control, memory
from connectors.programs.local_stack.control import PartStatus
from schemas.settings.kafka_settings import missing_login
from trunkline_agent.terminal_text import escaped

ARGUMENTS = (flag("--json", "one JSON object instead of a table"),)


def age_text(seconds: float | None) -> str:
    """Return an age in seconds as text in its two largest units, such as `3d 4h` or `2m 5s`; `-` for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    units = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    while len(units) > 1 and units[0][0] == 0:
        units.pop(0)
    return " ".join(f"{count}{unit}" for count, unit in units[:2])


def _table(parts: list[PartStatus]) -> str:
    rows = [
        (p.name, p.state, p.pid or None, age_text(p.uptime_s), None if p.rss_mb is None else f"{p.rss_mb:.0f}",
         p.restarts, p.summary)
        for p in parts
    ]  # fmt: skip
    return aligned(("PART", "STATE", "PID", "UP", "RSS MB", "RESTARTS", ""), rows)


def run(call: Call) -> int:
    """Print a table of the stack's parts, and why parts are not ready. Return 0 if all are ready, else 1.

    Without a running stack, it returns 1.
    """
    state = control.running_state(call.settings)
    parts = control.part_statuses(call.settings)
    chosen = state["parts"] if state else {}
    well = bool(chosen) and all(p.state == "ready" for p in parts if p.name in chosen)
    unsafe = missing_login(call.settings.kafka.security_protocol, call.settings.kafka.ssl_certfile)
    if call.json:
        phase = state["phase"] if state else "stopped"
        found = {
            "phase": phase,
            "data_dir": str(call.settings.data_path),
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
        if part.memory_kills:
            print(f"{part.name}: the kernel killed it {part.memory_kills} times for memory ({memory.PAGE})")
    if state is None:
        left = ", ".join(p.name for p in parts if p.pid)
        print(f"The supervisor has ended, {left} left: trunkline down" if left else "Start it: trunkline up")
    return 0 if well else 1
