"""Askers, who wait for the reply to their message, and answerers, who are sometimes too late for that."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from typing import Final

from tests.faults.prove.delivery_doors import HTTP, Lease, OwnMailbox
from tests.faults.prove.delivery_notes import ACK, Answered, Deliveries, Ending, Taking
from tests.faults.prove.hub_client import Clock, GaveUp
from tests.faults.prove.load_messages import mailbox
from tests.faults.prove.oracle import Oracle

# An answerer has its questions for longer than it may be late.
_LEASE_S: Final = 8
_PAUSE_S: Final = 0.3


class Asker:
    """Asks one question after the other, now and then the same one again. `own` may be an object of its own for
    each thread of one agent. `to`: the names of those who answer.
    """

    def __init__(
        self,
        own: OwnMailbox,
        to: tuple[str, ...],
        draw: random.Random,
        log: Deliveries,
        oracle: Oracle,
        clock: Clock,
    ) -> None:
        self._own, self._to, self._draw = own, to, draw
        self._log, self._oracle, self._clock = log, oracle, clock

    def run(self) -> None:
        """Ask until the load ends, and until a reply has come in time."""
        has_reply = False
        while self._clock.may_begin() or not has_reply:
            if not self._clock.has_patience():
                raise GaveUp(f"a reply to {self._own.name} in time")
            to, key = self._draw.choice(self._to), uuid.uuid4().hex
            text, wait_s = f"{self._own.name} asks {key} ☃", self._draw.randint(1, 3)
            reply = self._ask(to, text, key, wait_s)
            has_reply = has_reply or bool(reply)
            if self._draw.random() < 0.25:
                again = self._ask(to, text, key, 1)
                if reply and again != reply:
                    raise AssertionError(f"a question, asked again: the reply {reply}, then {again or 'none'}")
            time.sleep(_PAUSE_S)

    def _ask(self, to: str, text: str, key: str, wait_s: int) -> str:
        sent = time.time()
        question, reply = self._own.ask(to, text, key, wait_s, self._oracle)
        found = Answered(mailbox(self._own.name), question, sent, time.time())
        if reply is not None:
            if reply.in_reply_to != question:
                raise AssertionError(f"the reply to {question} is one to {reply.in_reply_to}")
            found = Answered(found.mailbox, question, sent, found.answered, reply.id, reply.body)
        self._log.note(found)
        return found.reply


class AskersMailbox:
    """Takes the replies that came too late, while the asker asks. `is_over`: nobody asks any more.

    It ends when each question has its reply, here or there.
    """

    def __init__(self, own: OwnMailbox, log: Deliveries, clock: Clock, is_over: Callable[[], bool]) -> None:
        self._own, self._log, self._clock, self._is_over = own, log, clock, is_over

    def run(self) -> None:
        """Take until each question has its reply."""
        while not (self._is_over() and self._has_all()):
            request = uuid.uuid4().hex
            if self._own.door == HTTP:
                self._own.take(request, limit=5)
            else:
                lease = self._own.take(request, limit=5, lease_s=_LEASE_S)
                if lease.got:
                    self._own.end(ACK, lease.id, [got.id for got in lease.got])
            if not self._clock.has_patience():
                raise GaveUp(f"replies to {self._own.name}")
            time.sleep(_PAUSE_S)

    def _has_all(self) -> bool:
        box = mailbox(self._own.name)
        answers = self._log.of(Answered, box)
        replied = {one.id for one in answers if one.reply}
        acked = {one.id for one in self._log.of(Ending, box) if one.is_done}
        for taking in self._log.of(Taking, box):
            replied |= {got.in_reply_to for got in taking.got if not taking.lease_s or got.id in acked}
        return {one.id for one in answers} <= replied


class Answerer:
    """Leases questions, replies to each, and acknowledges it.

    `are_answered`: each question has its reply, so that nothing more comes.
    """

    def __init__(
        self,
        own: OwnMailbox,
        draw: random.Random,
        oracle: Oracle,
        clock: Clock,
        are_answered: Callable[[], bool],
    ) -> None:
        self._own, self._draw, self._oracle = own, draw, oracle
        self._clock, self._are_answered = clock, are_answered

    def run(self) -> None:
        """Answer until each question has its reply, and take what is left."""
        while True:
            is_last = self._are_answered()
            lease = self._own.take(uuid.uuid4().hex, limit=3, lease_s=_LEASE_S, wait_s=1 if not is_last else 0)
            self._answer(lease, is_last=is_last)
            if is_last and not lease.got:
                return
            if not self._clock.has_patience():
                raise GaveUp(f"questions to {self._own.name}")

    def _answer(self, lease: Lease, *, is_last: bool) -> None:
        done = []
        for got in lease.got:
            if not is_last and self._draw.random() < 0.3:
                # Longer than some askers wait.
                time.sleep(self._draw.uniform(0.5, 2.0))
            text = f"{self._own.name} answers {got.body}"
            self._own.send(got.sender, text, f"answer-{got.id}", got.id, self._oracle)
            done.append(got.id)
        if done:
            self._own.end(ACK, lease.id, done)
