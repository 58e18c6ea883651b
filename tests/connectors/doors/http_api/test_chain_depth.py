"""A chain of messages from listener to listener ends at the limit, and the listener that asked last is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connectors.log.publisher import Publisher
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal
from tests.connectors.doors.http_api.test_xml_messages import SEARCH, Organism, local, search

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


@pytest.mark.requirement("ST-84")
@pytest.mark.parametrize("partner", [{"fast": "slow", "slow": "fast"}, {"fast": "fast"}], ids=["two", "itself"])
def test_listeners_that_answer_each_message_by_name_stop_at_the_limit(
    partner: dict[str, str],
    start_gateway: Callable[[Settings], GatewayProcess],
    backbone_settings: Settings,
    publisher: Publisher,
) -> None:
    pump = backbone_settings.xml_pump.model_copy(update={"chain_most": MOST})
    gateway = start_gateway(backbone_settings.model_copy(update={"xml_pump": pump}))
    with gateway.client() as operator:
        organism = Organism(gateway, operator, publisher)
        assert organism.post(search(), head="<to>fast</to>").status_code == 202
        kinds: list[str] = []
        while messages := organism.lease(*partner, wait_ms=3000)["messages"]:
            for message in messages:
                kinds.append(message["kind"])
                assert len(kinds) < 5 * MOST, "the chain does not end"
                answer = {"kind": "note", "body": "<note></note>", "to": partner[message["listener"]]}
                organism.settle(message, answer)
        assert kinds == ["search", *["note"] * (MOST - 1), "huh"]


@pytest.mark.requirement("ST-80")
def test_the_answer_of_a_listener_comes_into_a_mailbox_that_is_full_by_its_own_limit(
    start_gateway: Callable[[Settings], GatewayProcess], backbone_settings: Settings, publisher: Publisher
) -> None:
    gateway = start_gateway(backbone_settings)
    with gateway.client() as operator:
        organism = Organism(gateway, operator, publisher)
        token = add_principal(operator, "ann", "worker")
        with gateway.client(token) as ann:
            limits = operator.post("/api/hub/limits/name/ann", json={"pending_most": 1})
            assert limits.status_code == 200, limits.text
            body = {"recipient": "ann", "type": "note", "payload": 1}
            assert operator.post("/api/hub/messages", json=body).status_code == 200
            assert operator.post("/api/hub/messages", json=body).status_code == 429
            for outcome in ("handled", "huh"):
                assert organism.post(search(), ann, head="<to>fast</to>").status_code == 202
                (message,) = organism.lease("fast")["messages"]
                organism.settle(message, {"kind": "found", "body": "<found></found>"}, outcome=outcome)
            wait_until(lambda: len(organism.mailbox("ann")) == 3, what="the answer and the huh")
            assert {one["kind"] for one in organism.mailbox("ann")} == {"note", "found", "huh"}
