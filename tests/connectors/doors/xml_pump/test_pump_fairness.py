"""XP-08: one sender floods, nine send as usual, and keep what they had."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.broker_processes import BrokerProcess
from tests.connectors.doors.xml_pump.pump_stack import (
    Poster,
    PumpStack,
    document,
    element,
    listener,
    pump_stack,
)

NORMAL, EACH = 9, 8
EVERY_S = 0.5
# The last message may take this long to be answered, or as long as it took without the flood.
GRACE_S = 2.5
ALONE_S = 20.0
KEPT = 0.8


@pytest.fixture(scope="module")
def stack(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PumpStack]:
    """One slow listener that may handle four at once, and one pump."""
    organism = {"listeners": [listener("worker", "work", "work", concurrency=4)]}
    with pump_stack(kafka_broker, tmp_path_factory.mktemp("fairness"), organism) as found:
        found.start_pump()
        yield found


def sent_as_usual(poster: Poster, begin: float) -> None:
    """A message now and then, at its times."""
    for number in range(EACH):
        time.sleep(max(0.0, begin + number * EVERY_S - time.monotonic()))
        poster.send(element("work", number=number))


def answered(posters: list[Poster], grace_s: float) -> tuple[int, float]:
    """How many answers the nine have once they have all, or `grace_s` seconds after the last was sent; and how
    many seconds that were.
    """
    begin = time.monotonic()
    had = sum(len(poster.read) for poster in posters)
    with ThreadPoolExecutor(len(posters)) as pool:
        for done in [pool.submit(sent_as_usual, poster, begin) for poster in posters]:
            done.result()
    sent_at, count = begin + EACH * EVERY_S, 0
    while True:
        is_over = time.monotonic() > sent_at + grace_s
        count = sum(len(poster.answers(0)) for poster in posters) - had
        if is_over or count >= len(posters) * EACH:
            return count, time.monotonic() - sent_at
        time.sleep(0.05)


@pytest.mark.requirement("XP-08")
def test_nine_that_send_as_usual_keep_their_rate_while_a_tenth_floods(stack: PumpStack) -> None:
    posters, flooder = [stack.poster() for _ in range(NORMAL)], stack.poster()
    alone, took_s = answered(posters, ALONE_S)
    assert alone >= 0.9 * NORMAL * EACH, "the nine alone are no load"
    stopping, statuses = threading.Event(), []

    def flood() -> None:
        while not stopping.is_set() and len(statuses) < 100_000:
            statuses.append(flooder.post(document(element("work", number=1))).status_code)

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        beside, _ = answered(posters, max(GRACE_S, took_s))
    finally:
        stopping.set()
        flooding.join(20)
    # More than the nine together.
    assert len(statuses) > NORMAL * EACH
    assert set(statuses) <= {202, 429}
    assert beside >= KEPT * alone, (beside, alone, len(statuses))
