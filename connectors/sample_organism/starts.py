"""Gets `<boot/>` whenever a pump starts, and says so in the pump's log."""

from __future__ import annotations

import structlog

from connectors.sample_organism.payloads import Boot
from connectors.xml_pump.handlers import ListenerMessage, handles

log = structlog.stdlib.get_logger(__name__)


@handles(Boot)
async def note_start(message: ListenerMessage) -> None:
    """Answer nothing: nobody waits for it."""
    log.info("booted", thread=message.thread)
