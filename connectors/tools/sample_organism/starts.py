"""A listener that writes a log line at each start of the pump, which sends `<boot/>` then."""

from __future__ import annotations

import structlog

from connectors.doors.xml_pump.handlers import ListenerMessage, handles
from connectors.tools.sample_organism.payloads import Boot

log = structlog.stdlib.get_logger(__name__)


@handles(Boot)
async def note_start(message: ListenerMessage) -> None:
    """Write a log line that the pump has started, when the pump sends `<boot/>`.

    Returns None, which means no answer, because no listener waits for one.
    """
    log.info("booted", thread=message.thread)
