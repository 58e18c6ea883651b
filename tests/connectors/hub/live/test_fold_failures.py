"""A fold that fails on the event loop of the gateway is the last thing that the view does there (ST-98)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from connectors.hub.live.live_view import LiveView
from connectors.hub.services.log_appender import LogAppender
from connectors.log.publisher import Publisher
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import FoldSwitched
from schemas.streams.control.limits import LimitsSet
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import BackboneUnreachable

pytestmark = pytest.mark.requirement("ST-98")

SWITCH = FoldSwitched(from_version=FOLD_VERSION, to_version=FOLD_VERSION + 1, offsets={}).record(
    door="stack", principal="operator"
)


def limit(number: int) -> OutgoingRecord:
    """A record that the fold takes, on a stream of its own."""
    body = LimitsSet(scope="name", name=f"agent{number}", pending_most=1, request_id=f"r{number}")
    return body.record(door="http", principal="operator")


def busy_until(is_so: Callable[[], Any]) -> None:
    """Keep the event loop from its next step until something is so."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def waiting(view: LiveView) -> int:
    """The number of records that wait for the event loop. A batch of a poll that got none has none."""
    return sum(len(one.records) for one in list(view._turns.batches))


def test_no_batch_is_folded_after_one_that_failed_and_all_that_wait_are_told(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    view, told = LiveView(backbone_settings, keyring), list[Any]()

    async def serve(publisher: Publisher) -> None:
        view.fold_on(asyncio.get_running_loop())
        await asyncio.sleep(0.3)
        before = view.next_offsets()
        publisher.send(SWITCH, told.append)
        busy_until(lambda: waiting(view) == 1)
        for number in range(20):
            publisher.send(limit(number), told.append)
        busy_until(lambda: waiting(view) > 1)
        async with asyncio.timeout(20):
            while view._thread.is_alive() or view._turns.batches:
                await asyncio.sleep(0.01)
        assert view.failure is not None
        assert view.next_offsets() == before
        assert [type(one) for one in told] == [BackboneUnreachable] * 21

    view.open()
    try:
        with Publisher(backbone_settings, own=view.own) as publisher:
            asyncio.run(serve(publisher))
    finally:
        view.close()
    assert view.unwritten()[0] <= 1
    appender = LogAppender(backbone_settings, view)
    appender._publisher, appender._away = publisher, None
    with pytest.raises(BackboneUnreachable, match="the live view has stopped"):
        appender.check()


@pytest.mark.requirement("ST-89")
def test_a_step_of_the_loop_ends_after_some_milliseconds_whatever_its_records_cost(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    view, steps = LiveView(backbone_settings, keyring), list[int]()
    view.on_change(lambda _: time.sleep(0.005))
    view.on_settled(lambda settled: steps.append(len(settled)))

    async def serve(publisher: Publisher) -> None:
        view.fold_on(asyncio.get_running_loop())
        await asyncio.sleep(0.3)
        steps.clear()
        for number in range(40):
            publisher.append(limit(number))
        busy_until(lambda: waiting(view) == 40)
        async with asyncio.timeout(20):
            while sum(steps) < 40:
                await asyncio.sleep(0)
        await view.leave_loop()

    view.open()
    try:
        with Publisher(backbone_settings, linger_ms=1000) as publisher:
            asyncio.run(serve(publisher))
    finally:
        view.close()
    assert max(steps) <= 4
