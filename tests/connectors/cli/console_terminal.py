"""A command at a real terminal: what it writes there is read, and keys are pressed."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

import pytest

from schemas.settings.settings import PROJECT_ROOT

WAIT_S = 40.0


class Terminal:
    """`trunkline` with arguments, in a session of its own whose terminal we hold the other end of."""

    def __init__(self, environment: Mapping[str, str], *arguments: str) -> None:
        self._end, inner = pty.openpty()
        termios.tcsetwinsize(inner, (40, 200))
        self.seen = ""
        self._read_to = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "connectors.cli", *arguments],
            cwd=PROJECT_ROOT,
            env={**environment, "TERM": "xterm"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(inner)

    def press(self, keys: str) -> None:
        """Type; a line ends with `\\r`, Ctrl-C is `\\x03`, Ctrl-D `\\x04`."""
        os.write(self._end, keys.encode())

    def wait_for(self, text: str) -> str:
        """Wait until this text has come, behind what was waited for before; what came up to its end."""
        deadline = time.monotonic() + WAIT_S
        while (at := self.seen.find(text, self._read_to)) < 0:
            if time.monotonic() > deadline or not self._read():
                pytest.fail(f"no {text!r} in: {self.seen[self._read_to :]!r}")
        before, self._read_to = self.seen[self._read_to : at + len(text)], at + len(text)
        return before

    def ended(self) -> int:
        """Wait for the end; the exit code."""
        deadline = time.monotonic() + WAIT_S
        while self._read() and time.monotonic() < deadline:
            pass
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End it, if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        os.close(self._end)

    def _read(self) -> bool:
        """Take in what there is; False when the other end is closed."""
        if not select.select([self._end], [], [], 0.5)[0]:
            return True
        try:
            found = os.read(self._end, 65536)
        except OSError:  # so Linux says that nobody has the other end any more
            return False
        self.seen += found.decode("utf-8", "replace")
        return bool(found)


def _take_terminal() -> None:
    import fcntl

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
