"""Where the live view folds: on its own thread, then on an event loop, then on its thread again (ST-89)."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from typing import Any

import pytest

from connectors.hub.live.fold_turns import Batch, FoldTurns

pytestmark = pytest.mark.requirement("ST-89")


class Folding:
    """Folds numbers as the live view folds records, two in a step of the loop."""

    def __init__(self) -> None:
        self.turns, self.closing = FoldTurns(), threading.Event()
        self.folded: list[tuple[int, int]] = []

    def fetch(self, first: int, count: int) -> None:
        """Hand over a batch, or fold it here. Called by the thread that fetches."""
        batch: Any = Batch(deque(range(first, first + count)), {}, {})
        if not self.turns.hand_over(batch, self.on_loop, self.closing):
            with self.turns.alone(self.closing):
                self._fold(batch, count)

    def on_loop(self) -> None:
        """Fold a part of the oldest batch."""
        batch = self.turns.batches[0]
        self._fold(batch, 2)
        self.turns.done(batch, self.on_loop)

    def _fold(self, batch: Any, most: int) -> None:
        for _ in range(min(most, len(batch.records))):
            self.folded.append((batch.records.popleft(), threading.get_ident()))


def test_all_batches_are_folded_in_their_order_wherever_that_is() -> None:
    folding = Folding()

    async def serve() -> None:
        folding.turns.use(asyncio.get_running_loop())
        await asyncio.sleep(0.05)
        folding.turns.use(None)
        while folding.turns.batches:
            await asyncio.sleep(0)

    def fetch() -> None:
        for number in range(4000):
            folding.fetch(number * 5, 5)
            if number % 100 == 0:
                time.sleep(0.002)

    thread = threading.Thread(target=fetch)
    thread.start()
    asyncio.run(serve())
    thread.join(20)
    assert [number for number, _ in folding.folded] == list(range(20_000))
    assert {ident for _, ident in folding.folded} == {threading.get_ident(), thread.ident}


def test_the_thread_fetches_no_more_while_three_batches_wait_and_the_loop_begins_others_between_steps() -> None:
    folding, steps = Folding(), list[int]()

    async def serve() -> None:
        folding.turns.use(asyncio.get_running_loop())
        thread = threading.Thread(target=lambda: [folding.fetch(number * 10, 10) for number in range(6)])
        thread.start()
        while not folding.turns.batches:
            time.sleep(0.001)  # the loop is busy with something else
        time.sleep(0.3)
        assert len(folding.turns.batches) == 3
        while len(folding.folded) < 60:
            steps.append(len(folding.folded))
            await asyncio.sleep(0)
        await asyncio.to_thread(thread.join, 10)

    asyncio.run(serve())
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 2


def test_a_thread_that_closes_waits_for_no_loop() -> None:
    folding = Folding()

    async def serve() -> None:
        folding.turns.use(asyncio.get_running_loop())
        thread = threading.Thread(target=lambda: [folding.fetch(number, 1) for number in range(5)])
        thread.start()
        folding.closing.set()
        thread.join(10)
        assert not thread.is_alive()

    asyncio.run(serve())


def test_after_the_end_of_a_loop_that_nobody_left_the_thread_folds_again() -> None:
    folding, loop = Folding(), asyncio.new_event_loop()
    folding.turns.use(loop)
    loop.close()
    for first in (0, 5):
        folding.fetch(first, 5)
    assert folding.folded == [(number, threading.get_ident()) for number in range(10)]
