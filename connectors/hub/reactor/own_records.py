"""The records of this process that the reactor knows: its gateway's answers, and its own ones.

The log itself says how each record of a reactor was settled, also after a restart and at another gateway:

- Messages of Trunkline and answers of listeners are not limited, so that no full mailbox refuses them.
- A copy of a message to a topic, and the message of a schedule's run, may be refused. The reactor waits for
  their verdicts, and reports the refusal in the stream of the topic or of the schedule.
- The sender of a message over MQTT gets a notice (`schemas.effects.mailbox_effects`), and
  a listener whose answer goes to a removed listener gets a `<huh>` (`connectors.hub.reactor.derived_records`).
- Records that several gateways derive, or that come too late, are often rejected, because another one has done
  what they say. These rejections are normal.
- Any other rejection is logged as `derived_record_rejected`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import structlog

from connectors.hub.live.settled_feed import SettledRecord
from connectors.log.publisher import Append
from schemas.effects.following import DOOR
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.topic.topic_registry import TOPIC_DELIVERED, TOPIC_SUBSCRIBED
from schemas.wire.record import Record
from trunkline_agent.wire.verdicts import MAILBOX_FULL, REJECTED

# The reactor of another gateway may read the acknowledgement, so that no one here asks for it.
_KEPT: Final = 5000


class OwnAnswers:
    """The acknowledgements that this gateway appends, each with the appends of its answers. Thread-safe.

    The gateway calls `begin` before it appends an acknowledgement, and `end` when it has appended the answers.
    The reactor calls `wait` when it reads the acknowledgement. Without an entry, or if the gateway has failed
    to append the answers, the reactor posts them. Only the newest 5,000 acknowledgements are known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_ack: OrderedDict[str, Future[Sequence[Append] | None]] = OrderedDict()

    def begin(self, ack_id: str) -> None:
        """Note that this gateway appends the acknowledgement with the id `ack_id`, and then its answers."""
        with self._lock:
            self._by_ack[ack_id] = Future()
            if len(self._by_ack) > _KEPT:
                self._by_ack.popitem(last=False)

    def end(self, ack_id: str, appends: Sequence[Append] | None) -> None:
        """Report the appends of the answers; None if they are left to the reactor. Ends a wait of the reactor.

        Kafka need not have acknowledged the appends. An unknown `ack_id` is ignored.
        """
        with self._lock:
            found = self._by_ack.get(ack_id)
        if found is not None and not found.done():
            found.set_result(appends)

    def wait(self, ack_id: str, timeout_s: float) -> Sequence[Append] | None:
        """Return the appends of the answers to an acknowledgement, once: a later call returns None.

        Blocks until the gateway has appended them, at most `timeout_s` seconds. None means that the reactor
        has to post the answers.
        """
        with self._lock:
            found = self._by_ack.get(ack_id)
        appends = None
        if found is not None:
            with suppress(TimeoutError):
                appends = found.result(timeout_s)
            with self._lock:
                self._by_ack.pop(ack_id, None)
        return appends


log = structlog.stdlib.get_logger(__name__)

_SOURCE, _TYPE = 2, 3
_OWN: Final = f"{DOOR}/".encode()
# The types whose rejection is no race of two gateways.
_TO_REPORT: Final = frozenset(kind.encode() for kind in (MESSAGE_POSTED, TOPIC_DELIVERED, TOPIC_SUBSCRIBED))


def has_own_verdict(record: Record) -> bool:
    """Return whether the reactor has appended `record`, and a rejection of it is no race of two gateways."""
    values = record.header_values
    if len(values) <= _TYPE or values[_TYPE] not in _TO_REPORT:
        return False
    source = values[_SOURCE]
    return source is not None and source.startswith(_OWN)


def report_rejection(settled: SettledRecord) -> None:
    """Log the rejection of a record for which `has_own_verdict` is true. Nothing else reports it."""
    # The row of a schedule has the refusal of its message by a full mailbox.
    if settled.verdict == REJECTED and settled.reason != MAILBOX_FULL:
        log.error(
            "derived_record_rejected",
            stream=settled.stream,
            type=settled.type,
            id=settled.ce_id,
            reason=settled.reason,
            why=settled.why,
        )
