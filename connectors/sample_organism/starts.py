"""Log each start of a pump, which sends `<boot/>`."""

from __future__ import annotations

import structlog

from connectors.sample_organism.payloads import Boot
from connectors.xml_pump.handlers import ListenerMessage, handles

log = structlog.stdlib.get_logger(__name__)


@handles(Boot)
async def note_start(message: ListenerMessage) -> None:
    """Log the start. There is no answer, because no listener waits for one."""
    log.info("booted", thread=message.thread)
