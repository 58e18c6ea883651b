"""The refusal of a message that a client publishes, by the broker (LM-10).

The stack's own broker refuses what a paused account publishes, with the reason code 0x87 in the PUBACK. The
account has published far too many messages in a minute. The client publishes the message again after a while.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final

from paho.mqtt.reasoncodes import ReasonCode

NOT_AUTHORIZED: Final = 0x87
"""The reason code of a PUBACK when the account is paused, or has no right to the topic."""
PUBLISH_AGAIN_S: Final = 2.0
"""The time after which a refused message is published again, in seconds."""
PUBLISH_REFUSED: Final = (
    "the broker refuses what this account publishes. It pauses an account after far too many messages in a "
    "minute; otherwise the account has no right to this topic"
)
"""The text of the error when the broker refuses a message until the deadline."""


def refusal_of(puback: Future[ReasonCode]) -> ReasonCode | None:
    """Return the reason for which the broker has refused a message, None if it has not (yet).

    `puback` is the result of `MqttConnection.publish`. Does not block.
    """
    if not puback.done() or puback.exception() is not None:
        return None
    return puback.result() if puback.result().is_failure else None
