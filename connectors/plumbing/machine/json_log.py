"""The log of a program: one JSON object a line on stderr, without secrets, and a limit for each kind of line.

**Loses when** stderr cannot be written (its disk is full): these lines are lost, and nothing else fails. The
next line that can be written follows a line with the number of lost lines. A process that is killed loses the
`FrequentLines` of its last moment.

Any client can cause some lines as often as it likes (a request that is not HTTP, a connection beyond a budget).
Without a limit (`LogLimit`) they could push everything else out of the log. Imports nothing else of
`connectors`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from select import PIPE_BUF
from typing import Any, Final, Generic, TypeVar

import structlog

from trunkline_agent.wire.moments import iso_second

EVERY_S: Final = 5.0
_KINDS: Final = 256
_TEXT: Final = 80

_LineKind = TypeVar("_LineKind", bound=Hashable)


@dataclass
class _Kind:
    logged_at: float
    omitted: int = 0


class LogLimit(Generic[_LineKind]):
    """A limit for log lines, so that one kind of line cannot fill the log. Thread-safe.

    It writes nothing itself. Call `omitted` before each line.

    Args:
        every_s: the time from one line of a kind to the next, in seconds.
        clock: returns seconds and never goes back.
        most: the number of kinds within `every_s`. All further kinds count as one, `None`.
    """

    def __init__(
        self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic, most: int = _KINDS
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        # Sorted by the time of their last lines.
        self._kinds: OrderedDict[_LineKind | None, _Kind] = OrderedDict()

    def omitted(self, kind: _LineKind | None) -> int | None:
        """Decide whether to log a line of this kind now. None means: leave the line out.

        Args:
            kind: Any value that is equal for lines of the same kind.

        Returns:
            None: the caller must not log the line. Else the caller logs the line with this number: how many
            lines of the kind were left out since the last one, 0 or more. The number may be too low, because
            the count of a kind is lost when another kind needs its place. Regular calls of `due` prevent that.
        """
        now = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= self._most - 1:
                oldest = next(iter(self._kinds))
                if now - self._kinds[oldest].logged_at < self._every_s:
                    kind = None
                else:
                    del self._kinds[oldest]
            known = self._kinds.get(kind)
            if known is not None and now - known.logged_at < self._every_s:
                known.omitted += 1
                return None
            self._note(kind, now)
            return 0 if known is None else known.omitted

    def due(self) -> list[tuple[_LineKind | None, int]]:
        """Return each kind whose lines were left out until `every_s` was over, with the number of these lines.

        The caller logs one line with the number for each kind. The next `every_s` of these kinds begin now. A
        program that calls this from time to time also reports lines after which none of their kind followed.
        """
        now, found = self._clock(), []
        with self._lock:
            for kind, known in list(self._kinds.items()):
                if now - known.logged_at < self._every_s:
                    break
                if known.omitted:
                    found.append((kind, known.omitted))
                    self._note(kind, now)
                else:
                    del self._kinds[kind]
        return found

    def _note(self, kind: _LineKind | None, now: float) -> None:
        self._kinds[kind] = _Kind(now)
        self._kinds.move_to_end(kind)


class RepeatedLines(logging.Filter):
    """A filter for `logging` that leaves out repeated lines of libraries.

    The next line of the kind has the field `omitted`: how many lines were left out. If none follows, the number
    is not logged. A kind is a logger, a level, the error's type, and the first line of the message without its
    arguments.
    """

    def __init__(self, limit: LogLimit[Hashable] | None = None) -> None:
        super().__init__()
        self._limit = limit or LogLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line `record`.

        If earlier lines of its kind were left out, the record gets their number as attribute `omitted`.
        """
        error = record.exc_info[0] if record.exc_info else None
        text = str(record.msg).partition("\n")[0][:_TEXT]
        omitted = self._limit.omitted((record.name, record.levelno, error, text))
        if omitted:
            record.omitted = omitted
        return omitted is not None


BLANK: Final = "[secret]"
_STDERR: Final = 2
_TOGETHER_S: Final = 0.05
_HEADS: Final = 1000
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

    def __init__(self, program: str, redactor: _Redactor) -> None:
        self.program = program
        self.redactor = redactor
        # During a write, a signal handler or a finalizer may log on the same thread.
        self._lock = threading.RLock()
        self._waiting: deque[str] = deque()
        self._is_writing = False
        self._lost = 0
        self._is_cut = False

    def write(self, lines: str) -> None:
        """Write a line, or several with newlines between, or count them as lost. Never raises OSError."""
        with self._lock:
            self._waiting.append(lines)
            if self._is_writing:
                return  # written after the line that this thread is writing
            self._is_writing = True
            try:
                while self._waiting:
                    self._write(self._waiting.popleft())
            finally:
                self._is_writing = False

    def _write(self, lines: str) -> None:
        if self._lost and not self._refused(self._notice()):
            self._lost = 0
        self._lost += lines.count("\n") + 1 if self._lost else self._refused(lines)

    def _refused(self, lines: str) -> int:
        """Write lines, and return how many of them could not be written, or not to their ends."""
        if sys.stderr is None:
            return 0  # the program was started without stderr, so its number may be that of another file
        given = f"\n{lines}\n".encode() if self._is_cut else f"{lines}\n".encode()
        taken = 0
        try:
            # A signal may end a write to a pipe early.
            while taken < len(given):
                taken += os.write(_STDERR, given[taken:])
        except OSError:
            pass
        if taken:
            self._is_cut = taken < len(given)
        return min(given[taken:].count(b"\n"), lines.count("\n") + 1)

    def _notice(self) -> str:
        return json.dumps(
            {
                "event": "log_lines_lost",
                "lines": self._lost,
                "level": "warning",
                "logger": __name__,
                "program": self.program,
                "timestamp": _timestamp(time.time()),
            }
        )


def _timestamp(seconds: float) -> str:
    whole, micros = divmod(round(seconds * 1_000_000), 1_000_000)
    return f"{iso_second(whole)}.{micros:06d}Z"


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


# The lines of this program, until `configure_json_log` gives others.
_lines = _StderrLines("", _Redactor(()))


class FrequentLines:
    """Log lines of one event that come very often, such as with each request.

    They are written some 20 times a second, one after the other, and look like all other lines. The text of a
    line is kept for the next one with equal fields. For one event loop, and not thread-safe.

    Args:
        event: The event of the lines.
        logger: The name of the logger, usually `__name__`.
        fields: The names of the fields, without the time `ms`.
    """

    def __init__(self, event: str, logger: str, fields: Sequence[str]) -> None:
        self._event = event
        self._logger = logger
        self._fields = tuple(fields)
        self._heads: dict[tuple[Any, ...], str] = {}
        self._waiting: list[tuple[str, float, float]] = []

    def add(self, values: tuple[Any, ...], seconds: float) -> None:
        """Add a line of the level info. Call it on the event loop.

        Args:
            values: The values of the fields, in their order. A field whose value is None is left out.
            seconds: How long it took, shown as `ms`.
        """
        head = self._heads.get(values) or self._head(values)
        if not self._waiting:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self.flush)
        self._waiting.append((head, seconds, time.time()))

    def flush(self) -> None:
        """Write the lines that wait. Call it before the program ends."""
        waiting, self._waiting = self._waiting, []
        together = ""
        for head, seconds, at in waiting:
            line = f'{head}"ms": {seconds * 1000:.1f}, "timestamp": "{_timestamp(at)}"}}'
            # So many bytes stay together in a pipe that other programs write to.
            if together and len(together) + len(line) + 2 > PIPE_BUF:
                _lines.write(together)
                together = ""
            together = f"{together}\n{line}" if together else line
        if together:
            _lines.write(together)

    def _head(self, values: tuple[Any, ...]) -> str:
        if len(self._heads) >= _HEADS:
            self._heads.clear()
        named = {name: value for name, value in zip(self._fields, values, strict=True) if value is not None}
        of_all = {"program": _lines.program, "level": "info", "logger": self._logger}
        line = _lines.redactor(None, "info", {"event": self._event, **named, **of_all})
        head = self._heads[values] = f"{json.dumps(line)[:-1]}, "
        return head


def configure_json_log(program: str, secrets: Iterable[str] = ()) -> None:
    """Send the log lines of structlog and of `logging` to stderr, each as one JSON object.

    Call it once, in a program's `main`. The program itself logs from INFO on, libraries from WARNING on. Values
    whose keys name a secret, such as `password`, are replaced by `[secret]`.

    Args:
        program: the program's name, in each line.
        secrets: values that are replaced by `[secret]` wherever they appear.
    """
    global _lines
    redactor = _Redactor(secrets)
    chain: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redactor,
    ]
    lines = _lines = _StderrLines(program, redactor)
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
