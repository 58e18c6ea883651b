"""Logs of a program: one JSON object a line on stderr, secrets blanked out by key and by value."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, Final

import structlog

BLANK: Final = "[secret]"
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


class _NamedLogger(structlog.WriteLogger):
    """Writes lines to stderr, and knows for whom."""

    def __init__(self, *names: str) -> None:
        super().__init__(sys.stderr)
        self.name = names[0] if names else None


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
        logger_factory=_NamedLogger,
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
