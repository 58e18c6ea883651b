"""A client under test: a child process that answers requests, one line of JSON each, within bounds.

docs/reference/conformance_protocol.md describes the lines. A process that hangs, ends, prints something else or
prints too much raises ClientMisbehaved, which names what it did and has the end of its standard error.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from connectors.plumbing.machine.process_tree import clean_environment

PROTOCOL: Final = 1
LINE_BYTES: Final = 1024 * 1024
STDERR_BYTES: Final = 4096
# How long an answer may be late, and how long a process may take to end.
SLACK_S: Final = 5.0
_CHUNK: Final = 64 * 1024
_SHOWN: Final = 120
_DRAIN_S: Final = 0.5


class ClientMisbehaved(Exception):
    """The client's process broke the protocol. The message says how."""


class ClientRefused(Exception):
    """The client answered with an error: `kind`, `reason` and `retry_after_s` as in the protocol."""

    def __init__(self, do: str, error: dict[str, Any]) -> None:
        self.kind = str(error.get("kind"))
        self.reason = error.get("reason")
        self.retry_after_s = error.get("retry_after_s")
        message = error.get("message")
        super().__init__(f"{do}: error {self.kind}, reason {self.reason}" + (f": {message}" if message else ""))


class ClientProcess:
    """A process of the client under test, which leads a process group of its own.

    One thread at a time uses it. `close` ends it and its group.

    Args:
        command: The program and its arguments. No shell reads them.

    Raises:
        ClientMisbehaved: The program cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(  # noqa: S603  the program that the caller named
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise ClientMisbehaved(f"cannot start {command[0]}: {error.strerror}") from None
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._err = (pipe.fileno() for pipe in pipes if pipe is not None)
        os.set_blocking(self._in, False)
        self._number = 0
        self._waiting_for: tuple[int, str, float] | None = None
        self._unread = b""
        self._noise = b""
        self._listener = threading.Thread(target=self._listen, name="client-stderr", daemon=True)
        self._listener.start()

    def call(self, do: str, timeout_s: float = 10.0, **fields: Any) -> dict[str, Any]:
        """Send a request, wait for its answer, and return the fields of `ok`.

        Raises ClientRefused for an error, and ClientMisbehaved when the protocol is broken.
        """
        self.begin(do, timeout_s, **fields)
        return self.finish()

    def begin(self, do: str, timeout_s: float = 10.0, **fields: Any) -> None:
        """Send a request and return at once. Call `finish` for the answer, or `kill`."""
        if self._unread:
            raise self._fault(f"printed {_shown(self._unread)} without a request")
        self._number += 1
        request = {"id": self._number, "do": do, "timeout_s": timeout_s, **fields}
        line = json.dumps(request).encode("ascii") + b"\n"
        if len(line) > LINE_BYTES:
            raise ValueError(f"the request {do} is longer than a line may be")
        deadline = time.monotonic() + timeout_s + SLACK_S
        self._waiting_for = self._number, do, deadline
        try:
            while line:
                if not select.select([], [self._in], [], max(0.0, deadline - time.monotonic()))[1]:
                    raise self._fault(f"did not read the request {do} within {timeout_s + SLACK_S:g} s")
                line = line[os.write(self._in, line) :]
        except OSError:
            raise self._ended(do) from None

    def finish(self) -> dict[str, Any]:
        """Wait for the answer to the request that `begin` sent, and return the fields of `ok`."""
        if self._waiting_for is None:
            raise ValueError("there is no request to finish")
        (number, do, deadline), self._waiting_for = self._waiting_for, None
        line = self._line(do, deadline)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise self._fault(f"answered {do} with a line that is no JSON: {_shown(line)}") from None
        if not isinstance(answer, dict) or answer.get("id") != number:
            raise self._fault(f"answered {do} with {_shown(line)}, which has not the id {number}")
        ok, error = answer.get("ok"), answer.get("error")
        if isinstance(error, dict) and ok is None:
            raise ClientRefused(do, error)
        if not isinstance(ok, dict) or error is not None:
            raise self._fault(f"answered {do} with {_shown(line)}: expected an object `ok` or `error`")
        return ok

    def kill(self) -> None:
        """Kill the process and its group with SIGKILL, and wait for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SLACK_S)

    def pause(self) -> None:
        """Stop the process and its group (SIGSTOP), until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped process go on (SIGCONT)."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def leave(self) -> None:
        """Ask the process to end. Raises ClientMisbehaved when it has not ended 5 s after its answer."""
        self.call("close")
        try:
            self._process.wait(SLACK_S)
        except subprocess.TimeoutExpired:
            raise self._fault(f"still runs {SLACK_S:g} s after its answer to close") from None

    def close(self) -> None:
        """End the process and its group, whatever its state, and close the pipes."""
        self.kill()
        self._listener.join(SLACK_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def noise(self) -> str:
        """The end of the standard error."""
        return self._noise.decode("utf-8", "replace").strip()

    def _line(self, do: str, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            if len(self._unread) >= LINE_BYTES:
                raise self._fault(f"answered {do} with a line of more than {LINE_BYTES} bytes")
            if not select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._fault(f"did not answer {do} in time")
            found = os.read(self._out, _CHUNK)
            if not found:
                raise self._ended(do)
            self._unread += found
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self, do: str) -> ClientMisbehaved:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SLACK_S)
        code = self._process.poll()
        how = "closed its standard output" if code is None else f"ended with exit code {code}"
        return self._fault(f"{how} instead of an answer to {do}")

    def _fault(self, what: str) -> ClientMisbehaved:
        self.kill()
        self._listener.join(_DRAIN_S)
        return ClientMisbehaved(f"the client {what}")

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            while found := os.read(self._err, _CHUNK):
                self._noise = (self._noise + found)[-STDERR_BYTES:]


def _shown(line: bytes) -> str:
    text = line[: _SHOWN + 1].decode("utf-8", "replace")
    return repr(text if len(line) <= _SHOWN else text[:_SHOWN] + "…")
