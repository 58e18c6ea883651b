"""One run of another program: environment, input, output up to a limit, a time limit, and an end by signals."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Final

from trunkline_agent.command.stop_signals import StopSignals
from trunkline_agent.errors import UsageError

_CHUNK: Final = 65_536
_TICK_S: Final = 0.5
# Another process of the program may keep the pipe open after the program's end.
_DRAIN_S: Final = 1.0
# With these variables the program could act in the agent's name.
_SECRETS: Final = ("AGENT_KEY_PATH", "MQTT_PASSWORD", "MQTT_KEYFILE")
_WORDS: Final = ("CREDENTIALS", "TOKEN", "SECRET", "PASSWORD")


def environment_with(
    values: Mapping[str, str | None], *, has_secrets: bool, own: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return our environment for another program, with more variables.

    Args:
        values: The variables to add. None, and a text that no variable can have, leaves one out.
        has_secrets: Whether variables with secrets stay.
        own: The environment to begin with.
    """
    found = {name: value for name, value in own.items() if has_secrets or not _is_secret(name)}
    for name, text in values.items():
        found.pop(name, None)
        if text is not None and "\0" not in text:
            found[name] = text
    return found


def _is_secret(name: str) -> bool:
    return name in _SECRETS or (name.startswith("TRUNKLINE") and any(word in name for word in _WORDS))


@dataclass(frozen=True)
class Limits:
    """The limits of one run.

    Attributes:
        time_s: The time that the program has, in seconds. None: no limit.
        output_bytes: The bytes that it may write to stdout. A program that writes more is ended.
        grace_s: The time between SIGTERM and SIGKILL when the program has to end.
    """

    time_s: float | None = None
    output_bytes: int = 256 * 1024
    grace_s: float = 10.0


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        exit_code: The program's exit code; negative for the signal that ended it.
        output: Its output on stdout, up to the limit.
        why: Why we ended it, for people. Empty: it ended by itself.
    """

    exit_code: int
    output: bytes
    why: str = ""

    @property
    def is_good(self) -> bool:
        """True if the program ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.why

    @property
    def fault(self) -> str:
        """The fault in one line. Empty if the program ended well."""
        if self.why or self.exit_code == 0:
            return self.why
        if self.exit_code > 0:
            return f"exit code {self.exit_code}"
        with suppress(ValueError):
            return f"ended by {signal.Signals(-self.exit_code).name}"
        return f"ended by signal {-self.exit_code}"


class ChildProgram:
    """One run of a program in a process group of its own, so that a Ctrl-C at the terminal does not reach it.

    Args:
        command: The program and its arguments. No shell reads them.
        stdin: The bytes for its input. None: it has our own input.
        limits: The limits of the run.
        environment: Its environment.
        on_output: Called with each piece of its stdout as it comes. None: the pieces are kept for `Ended`.
    """

    def __init__(
        self,
        command: Sequence[str],
        stdin: bytes | None,
        limits: Limits,
        environment: Mapping[str, str],
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        self._limits = limits
        self._left = stdin or b""
        self._on_output = on_output
        self._output: list[bytes] = []
        self._bytes = 0
        self._why = ""
        self._kill_at: float | None = None
        try:
            self._process = subprocess.Popen(  # noqa: S603  the command of the user who runs us
                list(command),
                stdin=None if stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(environment),
                process_group=0,
                bufsize=0,
            )
        except OSError as error:
            raise UsageError(f"cannot run {command[0]!r}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"cannot run {command[0]!r}: {error}") from None

    def run(self, stop: StopSignals) -> Ended:
        """Wait for the program's end, and return how it ended. A signal to us ends the program first.

        Raises Stopped after a second signal; the program is killed then.
        """
        with stop.during(self._stop):
            try:
                return self._run(stop)
            finally:
                self._close()

    def _run(self, stop: StopSignals) -> Ended:
        started = time.monotonic()
        with selectors.DefaultSelector() as selector, _watched(self._process, selector) as ended:
            stdout = self._process.stdout
            assert stdout is not None  # noqa: S101  it is a pipe
            os.set_blocking(stdout.fileno(), False)
            selector.register(stdout, selectors.EVENT_READ)
            stdin = self._process.stdin
            if stdin is not None:
                os.set_blocking(stdin.fileno(), False)
                selector.register(stdin, selectors.EVENT_WRITE)
            drain_until: float | None = None
            is_open = True
            while is_open or drain_until is None:
                now = time.monotonic()
                if drain_until is not None and now > drain_until:
                    break
                self._check_time(now, started)
                for key, _ in selector.select(_TICK_S if drain_until is None else _DRAIN_S):
                    if key.fileobj is stdin:
                        self._write(selector, stdin)
                    elif key.fileobj is stdout:
                        is_open = self._read(selector, stdout)
                    else:
                        selector.unregister(ended)
                        drain_until = time.monotonic() + _DRAIN_S
        if stop.number is not None and not self._why:
            self._why = f"ended because of {signal.Signals(stop.number).name}"
        return Ended(self._process.wait(), b"".join(self._output), self._why)

    def _write(self, selector: selectors.BaseSelector, stdin: IO[bytes]) -> None:
        try:
            # A program that does not read its input may still end well.
            self._left = self._left[os.write(stdin.fileno(), self._left[:_CHUNK]) :] if self._left else b""
        except BlockingIOError:
            return
        except OSError:
            self._left = b""
        if not self._left:
            selector.unregister(stdin)
            with suppress(OSError):
                stdin.close()

    def _read(self, selector: selectors.BaseSelector, stdout: IO[bytes]) -> bool:
        """Read a piece of output. Return whether there may be more."""
        try:
            piece = os.read(stdout.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if not piece:
            selector.unregister(stdout)
            return False
        if self._on_output is not None:
            self._on_output(piece)
            return True
        self._bytes += len(piece)
        if self._bytes <= self._limits.output_bytes:
            self._output.append(piece)
        elif not self._why:
            self._end(f"more than {self._limits.output_bytes} bytes of output")
        return True

    def _check_time(self, now: float, started: float) -> None:
        limit = self._limits.time_s
        if limit is not None and now - started > limit and not self._why:
            self._end(f"not done within {limit:g} s")
        if self._kill_at is not None and now > self._kill_at:
            self._signal(signal.SIGKILL)

    def _end(self, why: str) -> None:
        self._why = why
        self._kill_at = time.monotonic() + self._limits.grace_s
        self._signal(signal.SIGTERM)

    def _stop(self, is_second: bool) -> None:
        """Handle a signal to us. It may come while any other method runs."""
        if is_second:
            self._signal(signal.SIGKILL)
        elif self._kill_at is None:
            self._kill_at = time.monotonic() + self._limits.grace_s
            self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        # `_watched` does not reap the process, so the id is not given to another one before `wait`.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _close(self) -> None:
        """Leave no process behind: after Stopped or an error of `on_output` the program is killed."""
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


@contextmanager
def _watched(process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> Iterator[int]:
    """Register and yield a descriptor that becomes readable when the process has ended."""
    reading, writing = os.pipe()

    def wait() -> None:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        os.close(writing)

    threading.Thread(target=wait, name="program-end", daemon=True).start()
    selector.register(reading, selectors.EVENT_READ)
    try:
        yield reading
    finally:
        os.close(reading)
