"""The time-outs and numbers of connections that the sync and the async client share."""

from __future__ import annotations

from typing import Final

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 20.0
# The gateway sends a comment on a silent stream every 15 s.
SILENCE_S: Final = 45.0
# Requests that may wait long are not counted, so that they never keep an acknowledgement from being sent.
BUSY_MOST: Final = 16
IDLE_MOST: Final = 16
