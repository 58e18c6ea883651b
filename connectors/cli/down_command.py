"""Stop the local stack: bridge, gateway, streaming jobs, Mosquitto, Kafka, in this order.

Nothing is left running, also when the supervisor itself was killed. The data stays.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from connectors.local_stack import control
from schemas.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """It has no arguments."""
    parser.set_defaults()


def _ignore(_state: dict[str, Any]) -> None:
    return None


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Stop it; nothing to stop is no error."""
    del args
    started = time.monotonic()
    if control.stop_detached(settings, _ignore):
        print(f"Stopped after {time.monotonic() - started:.1f} s.")
    else:
        print(f"Nothing runs (data_dir {settings.data_path}).")
    return 0
