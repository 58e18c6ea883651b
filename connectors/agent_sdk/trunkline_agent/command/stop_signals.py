"""SIGINT and SIGTERM for a loop whose steps must not be cut in half."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class Stopped(BaseException):
    """A signal ends the loop. `number` is the signal, and `exit_code` that of a shell for it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number
        self.signal_name = signal.Signals(number).name


class StopSignals:
    """The signals that end a loop. Use it with `with`, in the main thread; its end restores the handlers.

    Inside of `waiting` a signal raises Stopped at once. Elsewhere it is remembered in `number`, so that a step
    such as an acknowledgement is not cut in half. The second signal raises Stopped everywhere.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._is_waiting = False
        self._on_stop: Callable[[bool], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a signal end the block at once, by Stopped. So does a signal that came before the block."""
        self._is_waiting = True
        try:
            self.check()
            yield
        finally:
            self._is_waiting = False

    @contextmanager
    def during(self, on_stop: Callable[[bool], None]) -> Iterator[None]:
        """Call `on_stop` for a signal in the block, which goes on.

        The argument is True for the second signal, which then raises Stopped.
        """
        self._on_stop = on_stop
        try:
            if self.number is not None:
                on_stop(False)
            yield
        finally:
            self._on_stop = None

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.number is not None:
            raise Stopped(self.number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        is_second = self.number is not None
        self.number = number
        if self._on_stop is not None:
            self._on_stop(is_second)
        if self._is_waiting or is_second:
            raise Stopped(number)
