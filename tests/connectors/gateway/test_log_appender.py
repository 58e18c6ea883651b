"""The gateway's appender, looked at by one thread while another changes what it looks at."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from connectors.gateway.services.log_appender import LogAppender

LOOKS = 100_000


def test_whether_kafka_is_away_can_be_asked_while_appends_begin_and_end(backbone_settings: Any) -> None:
    appender = LogAppender(backbone_settings, None)  # type: ignore[arg-type]
    appender._away = None
    done = threading.Event()

    def begin_and_end() -> None:
        call = 0
        while not done.is_set():
            call += 1
            appender._under_way[call] = time.monotonic()
            time.monotonic()  # calls are where the interpreter goes over to another thread
            appender._under_way.pop(call - 3, None)

    other = threading.Thread(target=begin_and_end)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        assert {appender.away for _ in range(LOOKS)} == {None}
    finally:
        done.set()
        other.join(10)
        sys.setswitchinterval(usual)
