"""Start the local stack in the background, and wait until it is ready.

Kafka, Mosquitto, the bridges of MQTT and of the file queue, the gateway (HTTP), the XML pump and the streaming
jobs run on loopback, supervised: what dies is started again. Everything they keep is below `data_dir`. Running
it twice is harmless.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from connectors.local_stack import control
from connectors.local_stack.part_plan import ALL_PARTS
from schemas.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--only",
        metavar="PARTS",
        default=",".join(ALL_PARTS),
        help=f"some of: {','.join(ALL_PARTS)} (default: all)",
    )


class Progress:
    """Prints a line when a part becomes ready, and what is being waited for in between."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown: set[str] = set()
        self._live = sys.stderr.isatty()

    def __call__(self, state: dict[str, Any]) -> None:
        """Show what is new in the state."""
        waiting = []
        for name, part in state["parts"].items():
            if part["state"] != "ready":
                waiting.append(name)
            elif name not in self._shown:
                self._shown.add(name)
                self._clear()
                seconds = part["ready_after_s"] or 0.0
                print(f"  {part['summary']:<34} ready after {seconds:4.1f} s", file=sys.stderr)
        if waiting and self._live:
            text = f"  waiting for {', '.join(waiting)} ({time.monotonic() - self._started:.0f} s)"
            print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Start it, or say that it runs."""
    parts = [name.strip() for name in args.only.split(",") if name.strip()]
    before = control.running_state(settings)
    started = time.monotonic()
    if before is None:
        print(f"Starting; data and logs are in {settings.data_path}", file=sys.stderr)
    if before is not None and before["phase"] == "running":
        control.start_detached(settings, parts, lambda _state: None)
        print(f"It runs already (data in {settings.data_path}). See: trunkline status")
    else:
        control.start_detached(settings, parts, Progress())
        print(f"Ready after {time.monotonic() - started:.1f} s. Stop it with: trunkline down")
    return 0
