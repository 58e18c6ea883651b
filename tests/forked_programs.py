"""Our programs as child processes whose start costs a fork, and not the second that Python's imports take.

Each test process has one fork server (`tests/fork_server.py`), which ends with it. The parts of a stack,
the demo and the fault runs are started as a user starts them.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests import fork_server


class ForkServer:
    """A running fork server, which ends when `close` is called or this process ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-")
        self.address = f"{self._folder.name}/server"
        self._process = subprocess.Popen(
            [sys.executable, "-m", fork_server.__name__, "serve", self.address],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the server."""
        self._process.communicate()
        self._folder.cleanup()


@functools.cache
def running_server() -> ForkServer:
    """The fork server of this process, started at the first call; `close_server` ends it."""
    return ForkServer()


def close_server() -> None:
    """End the fork server of this process, if there is one."""
    if running_server.cache_info().currsize:
        running_server().close()
        running_server.cache_clear()


def forked_command(module: str) -> list[str]:
    """A command that does what `python -m module` does; its process passes signals on to the program's."""
    return [sys.executable, "-I", "-S", fork_server.__file__, "start", running_server().address, module]


class ForkedProcess:
    """A program that was started by a fork. It is used like a `subprocess.Popen` whose streams are files."""

    def __init__(self, module: str, folder: Path, environment: Mapping[str, str], output: int) -> None:
        request = {
            "module": module,
            "arguments": [],
            "environment": dict(environment),
            "folder": str(folder),
        }
        with Path(os.devnull).open() as nothing:
            files = (nothing.fileno(), output, output)
            self._connection, self.pid = fork_server.ask(running_server().address, request, files)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None if the program has not ended."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit code."""
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            self.returncode = fork_server.exit_code(self._connection)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the program has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program at once."""
        self.send_signal(signal.SIGKILL)
