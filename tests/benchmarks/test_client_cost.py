"""The cost of clients through the library: it is compared with the control in turns, and has a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarks import library_load, mcp_library, mqtt_publishers
from tests.benchmarks.bench_report import not_held

pytestmark = pytest.mark.requirement("AG-72")


def costs(calls: list[Any], control: Any, library: float) -> Callable[..., float]:
    """A function in the place of a measurement: 100 us for the control, and so much for any other client."""

    def cost(make: Any, *_: Any) -> float:
        calls.append(make)
        return 100.0 if make is control else library

    return cost


def in_async(cost: Callable[..., float]) -> Callable[..., Any]:
    """The same as a coroutine function."""

    async def run(*arguments: Any) -> float:
        return cost(*arguments)

    return run


@pytest.mark.parametrize(("library", "held"), [(130.0, True), (131.0, False)])
def test_a_client_that_costs_more_than_its_limit_is_reported(
    library: float, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        library_load, "request_cost_us", in_async(costs(calls, library_load.HttpAgents, library))
    )
    monkeypatch.setattr(mqtt_publishers, "event_cost_us", costs(calls, mqtt_publishers.HandWritten, library))
    monkeypatch.setattr(mqtt_publishers, "job_cost_us", lambda _: 5000.0)
    monkeypatch.setattr(mcp_library, "call_cost_us", in_async(costs(calls, mcp_library.by_hand, library)))
    hub = library_load.client_cost("http://hub", {}, 1)
    mqtt = mqtt_publishers.client_cost(object(), 1, 1)  # type: ignore[arg-type]
    mcp = mcp_library.client_cost("http://mcp", {}, 1)
    for found, at_most in (
        (hub, library_load.AT_MOST),
        (mqtt, mqtt_publishers.AT_MOST),
        (mcp, mcp_library.AT_MOST),
    ):
        assert found["client_cpu_ratio"] == library / 100
        assert (not_held(found, at_most) == []) is held
    pair = [library_load.HttpAgents, library_load.LibraryAgents]
    assert calls[: 2 * library_load.TURNS] == pair * library_load.TURNS
