"""A gateway with a planted bug: it answers for messages before Kafka has them. For the test of the harness.

It runs in the place of `connectors.doors.http_api`. An acknowledged message stays in memory for a while, as in
a careless buffer. A kill in that time loses it.
"""

from __future__ import annotations

import runpy
import threading
from typing import Final

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.log_appender import LogAppender
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.wire.record import OutgoingRecord, Position
from trunkline_agent.wire.verdicts import ACCEPTED

_BUFFERED_S: Final = 0.5


def install() -> None:
    """Put the bug in."""
    settle = LogAppender.settle

    async def answer_at_once(appender: LogAppender, record: OutgoingRecord) -> SettledRecord:
        if record.type != MESSAGE_POSTED:
            return await settle(appender, record)
        later = threading.Timer(_BUFFERED_S, lambda: appender._usable().append(record))
        later.daemon = True
        later.start()
        source = f"{record.door}/{record.principal}"
        return SettledRecord(
            Position(0, 0),
            record.stream,
            record.type,
            record.ce_id,
            source,
            ACCEPTED,
            reason=None,
            why=None,
            late=False,
            status_after=None,
            seq=None,
            logged_at_us=0,
            value=record.value,
        )

    LogAppender.settle = answer_at_once  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    runpy.run_module("connectors.programs.gateway_program", run_name="__main__", alter_sys=True)
