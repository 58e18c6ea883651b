"""Messages that wait for their time or end at it: their sender, their taker, and what must be true of them."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.faults.prove.comparison import LOST, MISBEHAVED, Finding, Mail
from tests.faults.prove.delivery_checks import Key
from tests.faults.prove.delivery_doors import HubMailbox
from tests.faults.prove.delivery_notes import Deliveries, Delivery, Published, Taking, Timed
from tests.faults.prove.hub_client import Clock, GaveUp
from tests.faults.prove.load_deliveries import IsOver
from tests.faults.prove.load_messages import mailbox
from tests.faults.prove.oracle import Oracle

_PAUSE_S: Final = 0.4
_DELAY_MOST_S: Final = 4.0
_LIFE_MOST_S: Final = 6.0
# The log says milliseconds.
_SAME_S: Final = 0.002


class TimedSender:
    """Sends messages that are delayed, or expire, or both, to the mailbox `to`."""

    def __init__(
        self, own: HubMailbox, to: str, draw: random.Random, log: Deliveries, oracle: Oracle, clock: Clock
    ) -> None:
        self._own, self._to, self._draw = own, to, draw
        self._log, self._oracle, self._clock = log, oracle, clock

    def run(self) -> None:
        """Send until the load ends."""
        while self._clock.may_begin():
            delay_s = self._draw.choice((0.0, self._draw.uniform(0.1, _DELAY_MOST_S)))
            life_s = self._draw.choice((0.0, delay_s + self._draw.uniform(0.1, _LIFE_MOST_S)))
            times = {"deliver_after_s": delay_s, "expires_in_s": life_s}
            key, sent = uuid.uuid4().hex, time.time()
            given = {name: value for name, value in times.items() if value}
            message_id = self._own.send(
                self._to, f"{self._own.name} in time {key}", key, None, self._oracle, **given
            )
            self._log.note(Timed(mailbox(self._to), message_id, sent, time.time(), **times))
            time.sleep(_PAUSE_S)


class TimedTaker:
    """Takes the messages of its mailbox for good, until all have come that do not expire or were published."""

    def __init__(self, own: HubMailbox, log: Deliveries, clock: Clock, is_over: IsOver) -> None:
        self._own, self._log, self._clock, self._is_over = own, log, clock, is_over

    def run(self) -> None:
        """Take until the load ends, and then all that is left."""
        while not (self._is_over() and self._all_came()):
            self._own.take(uuid.uuid4().hex, limit=3, wait_s=1)
            time.sleep(_PAUSE_S)
            if not self._clock.has_patience():
                raise GaveUp(f"the delayed messages of {self._own.name}")

    def _all_came(self) -> bool:
        box = mailbox(self._own.name)
        came = [got for taking in self._log.of(Taking, box) for got in taking.got]
        ids, texts = {got.id for got in came}, {got.body for got in came}
        sent = [one.id for one in self._log.of(Timed, box) if not one.expires_in_s]
        published = [one.text for one in self._log.all() if isinstance(one, Published) and box in one.mailboxes]
        return ids.issuperset(sent) and texts.issuperset(published)


def check_times(notes: Sequence[Delivery], mail: Mapping[Key, Mail], *, is_at_rest: bool) -> Iterator[Finding]:
    """Yield what came before its time or after its end, and in the end what neither came nor expired.

    Args:
        notes: All that the clients saw.
        mail: The messages in the end.
        is_at_rest: False: what is not there yet may still come.
    """
    timed = {(note.mailbox, note.id): note for note in notes if isinstance(note, Timed)}
    for note in notes:
        for got in note.got if isinstance(note, Taking) else ():
            one = timed.get((note.mailbox, got.id))
            if one is None:
                continue
            early_s = one.sent + one.deliver_after_s - note.answered
            if early_s > _SAME_S:
                yield Finding(MISBEHAVED, f"{one.mailbox} {one.id} came {early_s:.3f} s before its time")
            late_s = note.sent - (one.answered + one.expires_in_s)
            if one.expires_in_s and late_s > _SAME_S:
                yield Finding(MISBEHAVED, f"{one.mailbox} {one.id} came {late_s:.3f} s after its expiry")
    for key, one in timed.items() if is_at_rest else ():
        found = mail.get(key)
        wanted = ("claimed", "expired") if one.expires_in_s else ("claimed",)
        if found is not None and found.status not in wanted:
            yield Finding(LOST, f"{one.mailbox} {one.id} is {found.status}, and its time has come")
