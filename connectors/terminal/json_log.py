"""The log of a program: one JSON object a line on stderr, without secrets.

**Loses when** stderr cannot be written (its disk is full): these lines are lost, and nothing else fails. The
next line that can be written follows a line with the number of lost lines.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Final

import structlog

from connectors.terminal.log_limit import RepeatedLines

BLANK: Final = "[secret]"
_STDERR: Final = 2
_SECRET_KEYS: Final = ("secret", "password", "token", "authorization", "private_key", "master_key")


@lru_cache(1000)
def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in _SECRET_KEYS)


class _Redactor:
    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(s for s in secrets if s)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if _is_secret(key):
                event[key] = BLANK
            elif isinstance(value, str):
                for secret in self._secrets:
                    value = value.replace(secret, BLANK)
                event[key] = value
        return event


def _is_of_use(record: logging.LogRecord) -> bool:
    # kafka-python sometimes logs this with a traceback when a client is closed before it has found Kafka. It is
    # harmless.
    return record.msg != "Error closing coroutine for cancelled task"


class _StderrLines:
    """Writes lines to stderr, for all threads.

    There is no buffer, so that a line which a full disk has refused does not appear later, after newer lines.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        # During a write, a signal handler or a finalizer may log on the same thread.
        self._lock = threading.RLock()
        self._waiting: deque[str] = deque()
        self._is_writing = False
        self._lost = 0
        self._is_cut = False

    def write(self, line: str) -> None:
        """Write a line, or count it as lost. Never raises OSError."""
        with self._lock:
            self._waiting.append(line)
            if self._is_writing:
                return  # written after the line that this thread is writing
            self._is_writing = True
            try:
                while self._waiting:
                    self._write(self._waiting.popleft())
            finally:
                self._is_writing = False

    def _write(self, line: str) -> None:
        if self._lost and self._takes(self._notice()):
            self._lost = 0
        if self._lost or not self._takes(line):
            self._lost += 1

    def _takes(self, line: str) -> bool:
        if sys.stderr is None:
            return True  # the program was started without stderr, so its number may be that of another file
        given = f"\n{line}\n".encode() if self._is_cut else f"{line}\n".encode()
        taken = 0
        try:
            # A signal may end a write to a pipe early.
            while taken < len(given):
                taken += os.write(_STDERR, given[taken:])
        except OSError:
            pass
        if taken:
            self._is_cut = taken < len(given)
        return taken == len(given)

    def _notice(self) -> str:
        return json.dumps(
            {
                "event": "log_lines_lost",
                "lines": self._lost,
                "level": "warning",
                "logger": __name__,
                "program": self._program,
                "timestamp": f"{datetime.now(UTC).replace(tzinfo=None).isoformat()}Z",
            }
        )


class _StderrLogger:
    """The logger that structlog calls with a finished line."""

    def __init__(self, lines: _StderrLines, name: str | None = None) -> None:
        self.name = name
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = lines.write


class _StderrHandler(logging.Handler):
    """Writes the lines of libraries that use `logging`."""

    def __init__(self, lines: _StderrLines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.write(self.format(record))
        except Exception:  # noqa: BLE001  a failing log must not stop the program
            self.handleError(record)


def _add_logger_name(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record = event.get("_record")  # of a library that logs by `logging`
    event["logger"] = logger.name if record is None else record.name
    return event


def configure_json_log(program: str, secrets: Iterable[str] = ()) -> None:
    """Send the log lines of structlog and of `logging` to stderr, each as one JSON object.

    Call it once, in a program's `main`. The program itself logs from INFO on, libraries from WARNING on. Values
    whose keys name a secret, such as `password`, are replaced by `[secret]`.

    Args:
        program: the program's name, in each line.
        secrets: values that are replaced by `[secret]` wherever they appear.
    """
    chain: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _Redactor(secrets),
    ]
    lines = _StderrLines(program)
    # Our own lines do not go through `logging`, which takes nearly twice as long.
    structlog.configure(
        processors=[*chain, structlog.processors.JSONRenderer()],
        logger_factory=partial(_StderrLogger, lines),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    handler = _StderrHandler(lines)
    handler.addFilter(RepeatedLines())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *chain],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Its warnings only report slow callbacks of ours.
    selector = logging.getLogger("kafka.net.selector")
    selector.setLevel(logging.ERROR)
    selector.addFilter(_is_of_use)
    structlog.contextvars.bind_contextvars(program=program)
