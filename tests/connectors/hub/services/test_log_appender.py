"""The gateway's appender, looked at by one thread while another changes what it looks at."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.hub.services.log_appender import LogAppender
from schemas.settings.settings import GatewaySettings, Settings
from schemas.wire.record import OutgoingRecord, Position
from trunkline_agent.errors import BackboneUnreachable

LOOKS = 100_000


def test_whether_kafka_is_away_can_be_asked_while_appends_begin_and_end(backbone_settings: Any) -> None:
    appender = LogAppender(backbone_settings, None)  # type: ignore[arg-type]
    appender._away = None
    done = threading.Event()

    def begin_and_end() -> None:
        call = 0
        while not done.is_set():
            call += 1
            appender._under_way[call] = time.monotonic()
            time.monotonic()  # calls are where the interpreter goes over to another thread
            appender._under_way.pop(call - 3, None)

    other = threading.Thread(target=begin_and_end)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        assert {appender.away for _ in range(LOOKS)} == {None}
    finally:
        done.set()
        other.join(10)
        sys.setswitchinterval(usual)


RECORD = OutgoingRecord("job/0a1b2c3d", "id", "http", "ada", "job.event", b"{}")


class SilentPublisher:
    """A publisher whose records come back when the test says so."""

    def __init__(self) -> None:
        self.sent: list[Callable[[Any], None]] = []

    def send(self, record: OutgoingRecord, done: Callable[[Any], None], *, may_block: bool = True) -> bool:
        """As of the publisher."""
        self.sent.append(done)
        return True


@pytest.mark.requirement("ST-98")
def test_a_record_that_does_not_come_back_is_an_error_in_time_and_nothing_when_it_comes_late() -> None:
    settings = Settings(gateway=GatewaySettings(settle_timeout_s=0.1))
    publisher, told = SilentPublisher(), list[Any]()
    view: Any = SimpleNamespace(failure=None)

    async def settle() -> None:
        appender = LogAppender(settings, view)
        appender.settle_then(RECORD, told.append)
        assert [type(one) for one in told] == [BackboneUnreachable] and not publisher.sent
        told.clear()
        appender._away, appender._publisher = None, publisher  # type: ignore[assignment]
        for _ in range(2):
            appender.settle_then(RECORD, told.append)
        publisher.sent[0]("settled")
        assert told == ["settled"]
        async with asyncio.timeout(10):
            while len(told) < 2:
                await asyncio.sleep(0.01)
        assert isinstance(told[1], BackboneUnreachable) and appender.away == "Kafka does not answer"
        for late in publisher.sent:
            late("late")
            late(BackboneUnreachable("late"))
        await asyncio.sleep(0.2)
        assert len(told) == 2 and appender.away is None

    asyncio.run(settle())


@pytest.mark.requirement("ST-98")
def test_each_record_has_the_whole_time_before_it_is_an_error() -> None:
    settings, view = Settings(gateway=GatewaySettings(settle_timeout_s=0.2)), SimpleNamespace(failure=None)
    took: list[float] = []

    async def settle() -> None:
        appender = LogAppender(settings, view)  # type: ignore[arg-type]
        appender._away, appender._publisher = None, SilentPublisher()  # type: ignore[assignment]
        for _ in range(3):
            began = time.monotonic()
            appender.settle_then(RECORD, lambda _, began=began: took.append(time.monotonic() - began))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            while len(took) < 3:
                await asyncio.sleep(0.01)

    asyncio.run(settle())
    assert min(took) >= 0.2 and max(took) < 2


@pytest.mark.requirement("ST-98")
def test_an_error_of_one_who_is_told_too_late_holds_up_no_other() -> None:
    settings, view = Settings(gateway=GatewaySettings(settle_timeout_s=0.1)), SimpleNamespace(failure=None)
    told: list[Any] = []

    def fails(found: Any) -> None:
        raise RuntimeError(f"a bug, told {found}")

    async def settle() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        appender = LogAppender(settings, view)  # type: ignore[arg-type]
        appender._away, appender._publisher = None, SilentPublisher()  # type: ignore[assignment]
        for done in (fails, told.append, fails, told.append):
            appender.settle_then(RECORD, done)
        async with asyncio.timeout(2):
            while len(told) < 2:
                await asyncio.sleep(0.01)

    asyncio.run(settle())


def test_the_event_loop_waits_for_no_room_at_the_publisher() -> None:
    here, sent_by = threading.get_ident(), list[int]()

    class FullPublisher(SilentPublisher):
        def send(self, record: OutgoingRecord, done: Callable[[Any], None], *, may_block: bool = True) -> bool:
            if may_block:
                sent_by.append(threading.get_ident())
                done(SimpleNamespace(position=Position(0, 0)))
            return may_block

    async def settle() -> None:
        appender = LogAppender(Settings(), SimpleNamespace(failure=None))  # type: ignore[arg-type]
        appender._away, appender._publisher = None, FullPublisher()  # type: ignore[assignment]
        await appender.settle(RECORD)
        assert (await appender.append(RECORD)).result(10) == Position(0, 0)
        appender._hands.shutdown()

    asyncio.run(settle())
    assert len(sent_by) == 2 and here not in sent_by
