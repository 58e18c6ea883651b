"""Messages of the file queue that have expired."""

from __future__ import annotations

import time
from typing import Any

from trunkline_agent.queue import Queue

GONE_S = 0.001
"""The shortest time to live."""


def send_gone(queue: Queue, *given: Any, **options: Any) -> str:
    """Send a message, and return its id when it has expired."""
    msg_id = queue.send(*given, ttl_s=GONE_S, **options)
    time.sleep(3 * GONE_S)
    return msg_id
