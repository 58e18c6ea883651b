"""Careless consumers of one mailbox at two doors, and followers of another. They note what they see."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

from tests.faults.prove.delivery_doors import HubMailbox, Lease, McpMailbox, OwnMailbox
from tests.faults.prove.delivery_notes import ACK, EXTEND, NACK, Deliveries, Seen, Taking
from tests.faults.prove.hub_client import Clock, GaveUp
from tests.faults.prove.load_messages import MESSAGES, mailbox
from tests.faults.prove.oracle import ACKED, Oracle
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused
from trunkline_agent.hub.http_exchange import EventParser, ServerEvent
from trunkline_agent.hub.plans import Request
from trunkline_agent.hub.sync_client import HubClient

# The longest lease of a consumer.
LEASE_MOST_S: Final = 3
# After a lease that nobody ends, its messages come within so long to a consumer that waits.
AGAIN_WITHIN_S: Final = 2.0
_LATE_S: Final = 0.3
_PAUSE_S: Final = 0.2
# How long a patient consumer waits: so long that seldom one asks anew in the two seconds after a lease. It is
# less than the time after which a client gives an answer up.
_PATIENT_S: Final = 6.5
# Longer than that lease and the two seconds, so that no new message gives an old one away.
_SLOW_S: Final = 4.0
# A silent stream is left for another gateway.
_READS_S: Final = 2.0
_ANSWER_S: Final = 6.0
# A consumer draws a number from 0 to 1 for each message. From the first of these on it gives the message back,
# from the second on it extends the lease.
_NACKED: Final = 0.5
_EXTENDED: Final = 0.7

IsOver = Callable[[], bool]
"""Returns whether all senders have ended, so that nothing more comes."""


class Consumer:
    """Takes messages of a mailbox, and ends, forgets or keeps each lease as chance will have it.

    When all is sent, it goes on with more care until everything that was acknowledged to a sender has been
    handed out, and nothing has come for as long as a forgotten lease may last.
    """

    def __init__(
        self,
        own: OwnMailbox,
        draw: random.Random,
        log: Deliveries,
        oracle: Oracle,
        clock: Clock,
        is_over: IsOver,
    ) -> None:
        self._own, self._draw, self._log = own, draw, log
        self._oracle, self._clock, self._is_over = oracle, clock, is_over
        # Also a slow seed has to drain something, and to try the other ways to end a lease while others wait.
        self._is_to_drain = isinstance(own, HubMailbox)
        self._first_rolls = [_NACKED, _EXTENDED]

    def run(self) -> None:
        """Take until the load ends, and then all that is left."""
        while self._clock.may_begin():
            self._turn()
        self._take_the_rest()

    def _take_the_rest(self) -> None:
        last_s = LEASE_MOST_S + AGAIN_WITHIN_S
        while True:
            is_last = self._is_over() and self._all_came()
            if self._is_to_drain and not is_last:
                self._drain(wait_s=1)
            lease = self._own.take(
                uuid.uuid4().hex, limit=10, lease_s=LEASE_MOST_S, wait_s=last_s if is_last else 1
            )
            if lease.got:
                self._own.end(ACK, lease.id, [got.id for got in lease.got])
            elif is_last:
                return
            if not self._clock.has_patience():
                raise GaveUp(f"the rest of {self._own.name}")

    def _all_came(self) -> bool:
        box = mailbox(self._own.name)
        came = {got.id for taking in self._log.of(Taking, box) for got in taking.got}
        return all(note.id in came for note in self._oracle.notes(ACKED) if note.stream == box)

    def _turn(self) -> None:
        if self._is_to_drain:
            self._drain(wait_s=1)
            return
        roll, request = self._draw.random(), uuid.uuid4().hex
        if roll < 0.1 and isinstance(self._own, HubMailbox):
            self._drain()
            time.sleep(_PAUSE_S)
            return
        if roll < 0.15 and isinstance(self._own, McpMailbox):
            self._own.wait(1)
            return
        size = {"limit": self._draw.randint(1, 3), "lease_s": self._draw.randint(1, LEASE_MOST_S)}
        lease = self._own.take(request, **size, wait_s=self._draw.choice((0, 2, 3)))
        if lease.got and self._draw.random() < 0.1:
            self._again(lease, request, size)
        self._work(lease)
        if not lease.got:
            time.sleep(_PAUSE_S)

    def _drain(self, wait_s: float = 0) -> None:
        """Take messages for good."""
        if self._own.take(uuid.uuid4().hex, limit=2, wait_s=wait_s).got:
            self._is_to_drain = False

    def _again(self, lease: Lease, request: str, size: dict[str, int]) -> None:
        """Ask once more with the same id: the same messages, while they are leased."""
        again = self._own.take(request, **size)
        is_other = set(again.got) - set(lease.got)
        is_less = set(lease.got) - set(again.got) and time.time() < min(got.deadline for got in lease.got)
        if is_other or is_less:
            raise AssertionError(f"a lease, asked for again: {lease}, then {again}")

    def _work(self, lease: Lease) -> None:
        done = []
        for got in lease.got:
            roll = self._first_rolls.pop() if self._first_rolls else self._draw.random()
            if roll < _NACKED:
                done.append(got.id)
            elif roll < _EXTENDED:
                self._own.end(NACK, lease.id, [got.id], f"no disk {uuid.uuid4().hex[:8]}")
            elif roll < 0.8:
                # Beyond the first deadline, and within the new one if nothing is slow.
                if self._own.end(EXTEND, lease.id, [got.id]):
                    self._sleep_until(got.deadline + _LATE_S)
                    done.append(got.id)
            elif roll < 0.85:
                self._sleep_until(got.deadline + _LATE_S)
                done.append(got.id)
            # Otherwise this consumer has died, and one that knows nothing of the message goes on in its place.
        if done:
            self._own.end(ACK, lease.id, done)

    def _sleep_until(self, moment: float) -> None:
        time.sleep(min(max(0.0, moment - time.time()), LEASE_MOST_S + _LATE_S))


class PatientConsumer(Consumer):
    """Waits long for each message of a mailbox with few, and forgets most of them.

    So a lease often runs out while others wait, and no new message wakes them.
    """

    def _turn(self) -> None:
        lease = self._own.take(uuid.uuid4().hex, limit=1, lease_s=1, wait_s=_PATIENT_S)
        roll = self._draw.random()
        if lease.got and roll < 0.25:
            self._own.end(ACK if roll < 0.2 else NACK, lease.id, [lease.got[0].id])


class SureConsumer:
    """Sends messages to its own mailbox until it has extended, given back and acknowledged one of them.

    The other consumers leave this to chance, and faults may let each lease that they give back run out before.
    This one goes on until a gateway has accepted each way, also after the end of the load.
    """

    def __init__(self, own: OwnMailbox, oracle: Oracle, clock: Clock) -> None:
        self._own, self._oracle, self._clock = own, oracle, clock
        self._left = [EXTEND, NACK, ACK]

    def run(self) -> None:
        """Send and take until nothing is left to do, and then acknowledge what is left in the mailbox."""
        while self._left:
            lease = self._take(limit=1, wait_s=1)
            if lease.got:
                self._work(lease)
            else:
                key = uuid.uuid4().hex
                self._own.send(self._own.name, f"{self._own.name} keeps {key}", key, None, self._oracle)
        while (lease := self._take(limit=10, wait_s=LEASE_MOST_S + AGAIN_WITHIN_S)).got:
            self._own.end(ACK, lease.id, [got.id for got in lease.got])

    def _take(self, limit: int, wait_s: float) -> Lease:
        if not self._clock.has_patience():
            raise GaveUp(f"{self._own.name} could not {', '.join(self._left) or 'take the rest'}")
        return self._own.take(uuid.uuid4().hex, limit=limit, lease_s=LEASE_MOST_S, wait_s=wait_s)

    def _work(self, lease: Lease) -> None:
        for how in list(self._left):
            reason = f"not now {uuid.uuid4().hex[:8]}" if how == NACK else ""
            if not self._own.end(how, lease.id, [lease.got[0].id], reason):
                return  # the lease has run out, so the message comes again or is dead
            self._left.remove(how)
            if how == NACK:
                return


class SlowSender:
    """Sends a message to a mailbox now and then."""

    def __init__(self, own: OwnMailbox, to: str, oracle: Oracle, clock: Clock) -> None:
        self._own, self._to, self._oracle, self._clock = own, to, oracle, clock

    def run(self) -> None:
        """Send until the load ends."""
        while self._clock.may_begin():
            key = uuid.uuid4().hex
            self._own.send(self._to, f"{self._own.name} sends {key}", key, None, self._oracle)
            time.sleep(_SLOW_S)


class Follower:
    """Follows a mailbox's stream, and goes on after its last event: when the stream breaks, and every few
    seconds, each time at the next gateway.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        name: str,
        number: int,
        log: Deliveries,
        oracle: Oracle,
        clock: Clock,
        is_over: IsOver,
    ) -> None:
        self._urls, self._number = urls, number
        self._box, self._name = mailbox(name), f"{name}-{number}"
        self._log, self._oracle, self._clock, self._is_over = log, oracle, clock, is_over
        self._draw = random.Random(f"follow/{self._name}")
        self._gateways = {url: HubClient(HubAccess(url, token), answer_timeout_s=_ANSWER_S) for url in urls}
        self._last = ""
        self._seen: set[str] = set()
        self.resumed = 0

    def run(self) -> None:
        """Follow until everything that was acknowledged has come, or was taken before."""
        while not self._has_all():
            url = self._urls[self._number % len(self._urls)]
            self._number += 1
            try:
                self._follow(url, time.monotonic() + self._draw.uniform(1, 4))
            except (BackboneUnreachable, NotFound, Refused):
                # The gateway is away, or has not read of the mailbox or the token yet.
                time.sleep(_PAUSE_S)
            if not self._clock.has_patience():
                raise GaveUp(f"the stream of {self._box}")

    def close(self) -> None:
        """End the connections."""
        for gateway in self._gateways.values():
            gateway.close()

    def _has_all(self) -> bool:
        if self._clock.may_begin() or not self._is_over():
            return False
        taken = {got.id for taking in self._log.of(Taking, self._box) for got in taking.got}
        acked = {note.id for note in self._oracle.notes(ACKED) if note.stream == self._box}
        return acked <= self._seen | taken

    def _follow(self, url: str, until: float) -> None:
        resumed = {"Last-Event-ID": self._last} if self._last else {}
        self.resumed += bool(resumed)
        # Not the events, but the parts: also a comment ends the time at this gateway.
        parser = EventParser()
        parts = self._gateways[url].parts(Request("GET", f"{MESSAGES}/events", headers=resumed), _READS_S)
        with closing(parts):
            for part in parts:
                for event in parser.feed(part):
                    self._note(event, url)
                if time.monotonic() > until:
                    return

    def _note(self, event: ServerEvent, url: str) -> None:
        self._last = event.id or self._last
        message_id = event.json()["id"]
        self._seen.add(message_id)
        self._log.note(Seen(self._name, self._box, self._last, message_id, time.time(), url))
