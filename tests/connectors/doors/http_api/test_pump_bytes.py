"""A pump's lease is bounded in bytes, over all listeners together (LM-11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connectors.log.publisher import Publisher
from schemas.settings.sections import LimitSettings
from schemas.settings.settings import Settings
from tests.connectors.doors.http_api.hub_access import GatewayProcess
from tests.connectors.doors.http_api.test_xml_messages import Organism, search

_ANSWER_BYTES = 64 * 1024


@pytest.mark.requirement("LM-11")
def test_a_pump_leases_what_fits_of_all_listeners_and_goes_on_at_once(
    backbone_settings: Settings, start_gateway: Callable[..., GatewayProcess], publisher: Publisher
) -> None:
    limits = LimitSettings(answer_bytes=_ANSWER_BYTES)
    gateway = start_gateway(backbone_settings.model_copy(update={"limits": limits}))
    with gateway.client() as operator:
        organism = Organism(gateway, operator, publisher)
        for name, count in (("fast", 4), ("slow", 1)):
            for number in range(count):
                posted = organism.post(search(f"{number}" + "x" * 30_000), head=f"<to>{name}</to>")
                assert posted.status_code == 202, posted.text
        sizes, found = list[int](), list[str]()
        while len(found) < 5:
            # The first one waits until the listeners' messages are known. No later one may have to wait.
            messages = organism.lease("fast", "slow", wait_ms=0 if found else 10_000)["messages"]
            assert messages, "what did not fit must not wait for a pause"
            found += [one["message_id"] for one in messages]
            sizes.append(sum(len(one["body"]) for one in messages))

        assert len(set(found)) == 5
        assert max(sizes) <= _ANSWER_BYTES + 32_000
        assert operator.get("/metrics").text.count("trunkline_answer_memory_bytes 0.0") == 1
