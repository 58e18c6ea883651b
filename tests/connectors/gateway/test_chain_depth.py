"""A chain of messages from listener to listener ends at the limit, and the listener that asked last is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connectors.log.publisher import Publisher
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until
from tests.connectors.gateway.hub_access import GatewayProcess
from tests.connectors.gateway.test_xml_messages import SEARCH, Organism, local, search

MOST = 4


@pytest.mark.requirement("XB-03")
def test_a_chain_of_messages_ends_at_the_limit_with_a_huh_to_who_asked(
    start_gateway: Callable[[Settings], GatewayProcess], backbone_settings: Settings, publisher: Publisher
) -> None:
    pump = backbone_settings.xml_pump.model_copy(update={"chain_most": MOST})
    gateway = start_gateway(backbone_settings.model_copy(update={"xml_pump": pump}))
    with gateway.client() as operator:
        organism = Organism(gateway, operator, publisher)
        assert organism.post(search(), head="<to>fast</to>").status_code == 202
        # `fast` and `slow` take the same tag, so each hands the question on to the other.
        handled = []
        for _ in range(MOST):
            (message,) = organism.lease("fast", "slow")["messages"]
            handled.append((message["listener"], message["kind"]))
            organism.settle(message, {"kind": "search", "namespace": SEARCH, "body": search()})
        assert handled == [("fast", "search"), ("slow", "search")] * (MOST // 2)
        (refused,) = organism.lease("fast", "slow")["messages"]
        assert (refused["listener"], refused["kind"], refused["sender"]) == ("fast", "huh", "slow")
        told = local(refused["body"].encode())
        assert told["step"] == "routing" and f"{MOST} messages" in told["why"]
        assert "xml_pump.chain_most" in told["expected"]
        # An answer to who asked ends the chain, and is no part of it.
        organism.settle(refused, {"kind": "found", "body": "<found></found>"})
        (found,) = organism.lease("slow")["messages"]
        assert (found["kind"], found["is_reply"]) == ("found", True)
        assert organism.lease("fast", "slow", wait_ms=0)["messages"] == []
        wait_until(lambda: len(operator.get("/api/hub/threads").json()["threads"]) == MOST, what="the tree")
