"""The verdicts on the records that the reactor appends itself, with a rule for each kind of them.

The log itself says how each of them was settled, also after a restart and at another gateway:

- Messages of Trunkline and answers of listeners are not limited, so that no full mailbox refuses them.
- A copy of a message to a topic, and the message of a schedule's run, may be refused. The reactor waits for
  their verdicts, and reports the refusal in the stream of the topic or of the schedule.
- The sender of a message over MQTT gets a notice (`connectors.hub.reactor.verdict_records`), and a listener
whose
  answer goes to a removed listener gets a `<huh>` (`connectors.hub.reactor.xml_records`).
- Records that several gateways derive, or that come too late, are often rejected, because another one has done
  what they say. These rejections are normal.
- Any other rejection is logged as `derived_record_rejected`.
"""

from __future__ import annotations

from typing import Final

import structlog

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.reactor.derived_records import DOOR
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.topic.topic_registry import TOPIC_DELIVERED, TOPIC_SUBSCRIBED
from schemas.wire.record import Record
from trunkline_agent.wire.verdicts import MAILBOX_FULL, REJECTED

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
