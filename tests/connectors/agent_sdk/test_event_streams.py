"""The library's readers of event streams: the bound of an event, and random pauses before they come back."""

from __future__ import annotations

import pytest

from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.hub import http_exchange
from trunkline_agent.hub.http_exchange import EventParser
from trunkline_agent.jobs.delegator_plans import JobWatch


@pytest.mark.requirement("LM-21")
@pytest.mark.parametrize("part", [b"x", b"data: x\n", b"data:\n", b":\n", b"data: x\r"])
def test_an_event_without_an_end_is_refused_in_one_line_and_in_many(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "_EVENT_BYTES_MOST", 1000)
    parser, fed = EventParser(), 0
    with pytest.raises(TrunklineError, match="more than 1000 bytes"):
        while fed < 10_000:
            assert parser.feed(part) == []
            fed += len(part)
    assert fed <= 1010


@pytest.mark.requirement("LM-21")
def test_many_events_pass_a_bound_that_each_of_them_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "_EVENT_BYTES_MOST", 20)
    parser = EventParser()
    parts = [b": ping\n\ndata: %d\n\n" % number for number in range(100)]
    # Byte by byte, because only a part that ends no event is measured.
    found = [event.data for part in parts for byte in part for event in parser.feed(bytes([byte]))]
    assert found == [str(number) for number in range(100)]


@pytest.mark.requirement("LM-20")
def test_watchers_of_jobs_come_back_at_random_times() -> None:
    def pauses() -> list[float]:
        watch = JobWatch("0a1b2c3d", None, None, 30.0)
        return [watch.pause_s(BackboneUnreachable("away")) for _ in range(6)]

    found = [pauses() for _ in range(200)]
    for attempt, longest in enumerate((0.5, 1.0, 2.0, 3.0, 3.0, 3.0)):
        of_all = [one[attempt] for one in found]
        assert longest / 2 <= min(of_all) and max(of_all) <= longest
        assert len({int(10 * pause) for pause in of_all}) >= 3
