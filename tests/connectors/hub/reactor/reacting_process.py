"""A process with a live view and a reactor that kills itself at a step: for the tests of the reactor.

python -m tests.connectors.hub.reactor.reacting_process STEP NUMBER

It dies at the NUMBERth call of STEP, and never with `- 0`. Steps after an append count from the first one on,
because the first records of a slow log have no derived ones.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from connectors.hub.live.live_view import LiveView
from connectors.hub.reactor.reactor import Reactor
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import load_settings


def main(step: str, number: int) -> None:
    """Run until killed."""
    settings = load_settings()
    calls, has_appended = 0, False

    def count(name: str) -> None:
        nonlocal calls, has_appended
        has_appended |= name == "appended"
        counts = name == step and (has_appended or step in ("seen", "before_append"))
        calls += counts
        if counts and calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    view = LiveView(settings, load_keyring(settings))
    view.open()
    Reactor(settings, view, count).start()
    Path(os.environ["TRUNKLINE_READY_FILE"]).touch()
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
