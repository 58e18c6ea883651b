"""What the `mcp` package logs, in our form: where and which error, and nothing of what agents sent."""

from __future__ import annotations

import logging
from typing import Final

import structlog

log = structlog.stdlib.get_logger(__name__)

_LIBRARY: Final = "mcp"


class _WithoutText(logging.Handler):
    """Its texts and its tracebacks quote bodies, headers and addresses."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        log.log(
            record.levelno,
            "mcp_library",
            module=record.name,
            line=record.lineno,
            error=None if error is None else error.__name__,
        )


def keep_texts_out_of_log() -> None:
    """Do it for this process, from WARNING on."""
    library = logging.getLogger(_LIBRARY)
    library.handlers[:] = [_WithoutText(logging.WARNING)]
    library.setLevel(logging.WARNING)
    library.propagate = False
