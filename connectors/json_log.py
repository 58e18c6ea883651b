"""Logs of a program: one JSON object a line on stderr, secrets blanked out by key and by value.

**Loses when** stderr takes nothing (its disk is full): what is logged then is gone, and nothing else fails.
Before the first line that is taken again stands how many were not.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable, MutableMapping
from typing import Any, Final

import structlog

BLANK: Final = "[secret]"
_STDERR: Final = 2
_SECRET_KEYS: Final = ("secret", "password", "token", "authorization", "private_key", "master_key")


class _Redactor:
    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(s for s in secrets if s)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if any(word in key.lower() for word in _SECRET_KEYS):
                event[key] = BLANK
            elif isinstance(value, str):
                for secret in self._secrets:
                    value = value.replace(secret, BLANK)
                event[key] = value
        return event


def _is_of_use(record: logging.LogRecord) -> bool:
    # A client that is closed while it still looks for Kafka ends what its own thread may be at: that goes wrong
    # now and then, with a traceback, and changes nothing.
    return record.msg != "Error closing coroutine for cancelled task"


class _StderrLogger:
    """Writes lines to stderr, and knows for whom.

    Each is one write, without a buffer: what a full disk refuses must not come later, behind newer lines.
    """

    _lock = threading.Lock()
    _lost = 0

    def __init__(self, *names: str) -> None:
        self.name = names[0] if names else None

    def msg(self, line: str) -> None:
        """Write a line, or count it as lost."""
        owner = _StderrLogger
        with owner._lock:
            if owner._lost:
                # On a line of its own: the last one may have been cut off.
                line = f'\n{{"event": "log_lines_lost", "level": "warning", "lines": {owner._lost}}}\n{line}'
            given = f"{line}\n".encode()
            try:
                is_whole = os.write(_STDERR, given) == len(given)
            except OSError:
                is_whole = False
            owner._lost = 0 if is_whole else owner._lost + 1

    debug = info = warning = error = critical = exception = msg


def _add_logger_name(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record = event.get("_record")  # of a library that logs by `logging`
    event["logger"] = logger.name if record is None else record.name
    return event


def configure_json_log(program: str, secrets: Iterable[str] = (), level: int = logging.INFO) -> None:
    """Send structlog's and the libraries' log lines as JSON to stderr; libraries from WARNING on.

    `secrets` are values that are blanked out wherever they stand. Call it once, in a program's `main`.
    """
    chain: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _Redactor(secrets),
    ]
    # Our own lines go straight to stderr: the way through `logging` takes nearly twice as long.
    structlog.configure(
        processors=[*chain, structlog.processors.JSONRenderer()],
        logger_factory=_StderrLogger,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
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
    # Says as a warning only that callbacks of ours took their time.
    selector = logging.getLogger("kafka.net.selector")
    selector.setLevel(logging.ERROR)
    selector.addFilter(_is_of_use)
    structlog.contextvars.bind_contextvars(program=program)
