"""A mailbox with a small limit: who fills it through several gateways, and what must be true of it."""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.faults.prove.comparison import LOST, MISBEHAVED, Finding, Line, Mail
from tests.faults.prove.delivery_checks import Key
from tests.faults.prove.delivery_doors import HubMailbox
from tests.faults.prove.delivery_notes import Deliveries, Delivery, Filled
from tests.faults.prove.hub_client import Clock, GaveUp, HubClient, shown
from tests.faults.prove.load_messages import mailbox
from tests.faults.prove.oracle import Oracle

PENDING_MOST: Final = 5
_PAUSE_S: Final = 0.3
_TAKE_PAUSE_S: Final = 3.0
_TAKEN_MOST: Final = 4


def limit_mailbox(operator: HubClient, name: str) -> None:
    """Set the limit of the mailbox, while all is well."""
    answer = operator.ask("POST", f"/api/hub/limits/name/{name}", json={"pending_most": PENDING_MOST})
    if answer.status != 200:
        raise AssertionError(f"the limit of {name} was not set: {shown(answer)}")


class Filler:
    """Sends messages to the mailbox `to`, whether it is full or not. Several of them overfill it."""

    def __init__(
        self, own: HubMailbox, to: str, draw: random.Random, log: Deliveries, oracle: Oracle, clock: Clock
    ) -> None:
        self._own, self._to, self._draw = own, to, draw
        self._log, self._oracle, self._clock = log, oracle, clock

    def run(self) -> None:
        """Send until the load ends, and the mailbox was full once, which takes long where all is slow."""
        was_full = False
        while self._clock.may_begin() or not was_full:
            if not self._clock.has_patience():
                raise GaveUp(f"{self._to} was never full")
            key = uuid.uuid4().hex
            text = f"{self._own.name} fills {key}"
            sends = self._own.client.sends
            message_id = self._own.try_to_send(self._to, text, key, self._oracle)
            # A request that was sent twice may be refused although the first one's message is there.
            if message_id is not None or self._own.client.sends == sends + 1:
                self._log.note(Filled(mailbox(self._to), text, message_id or ""))
                was_full = was_full or message_id is None
            time.sleep(self._draw.uniform(0, _PAUSE_S))


class Emptier:
    """Takes a few messages of its mailbox for good now and then."""

    def __init__(self, own: HubMailbox, clock: Clock) -> None:
        self._own, self._clock = own, clock

    def run(self) -> None:
        """Take until the load ends."""
        while self._clock.may_begin():
            time.sleep(_TAKE_PAUSE_S)
            self._own.take(uuid.uuid4().hex, limit=_TAKEN_MOST)


def check_full_mailbox(
    notes: Sequence[Delivery], mail: Mapping[Key, Mail], ledger: Sequence[Line], box: str, *, is_at_rest: bool
) -> Iterator[Finding]:
    """Yield each offset with too many pending messages, and messages that are there or not against the answer.

    The count knows the order of the ledger's rows and which request took a message in the end, and nothing of
    the fold's own count.

    Args:
        notes: All that the clients saw.
        mail: The messages in the end.
        ledger: The ledger's rows.
        box: The mailbox with the limit.
        is_at_rest: False: what is not there yet may still come. Then nobody knows how many messages a request
            took, so they are not counted.
    """
    mine = {one.id: one for key, one in mail.items() if key[0] == box}
    taken = Counter(one.request for one in mine.values() if one.status == "claimed")
    pending = 0
    for line in sorted((one for one in ledger if one.stream == box), key=lambda one: one.offset):
        if line.verdict != "accepted":
            continue
        if line.type == "message.claimed":
            pending -= taken.pop(line.request, 0)
        elif line.type == "message.posted":
            pending += 1
            if is_at_rest and pending > PENDING_MOST:
                what = f"{box} has {pending} messages at offset {line.offset}, at most {PENDING_MOST}"
                yield Finding(MISBEHAVED, what)
    texts = {one.body for one in mine.values()}
    for note in notes:
        if not isinstance(note, Filled) or note.mailbox != box:
            continue
        if not note.id and any(note.text in text for text in texts):
            yield Finding(MISBEHAVED, f"{box} was full for {note.text!r}, and has it")
        elif note.id and note.id not in mine and is_at_rest:
            yield Finding(LOST, f"{box} {note.id} was accepted, and is not there")
