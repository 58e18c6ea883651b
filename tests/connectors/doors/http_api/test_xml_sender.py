"""The library's sender to the XML door, sync and async, at a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from lxml import etree

from connectors.log.publisher import Publisher
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal
from tests.connectors.doors.http_api.test_xml_messages import Organism, local, search
from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import MessageRejected, Refused, UsageError
from trunkline_agent.xml import AsyncXmlSender, PostedXml, XmlSender

pytestmark = pytest.mark.requirement("AG-84")


@pytest.fixture
def organism(gateway: GatewayProcess, operator: httpx.Client, publisher: Publisher) -> Iterator[Organism]:
    """One gateway with five listeners."""
    yield Organism(gateway, operator, publisher)


def test_a_payload_is_delivered_to_its_listeners_on_a_thread_and_a_refusal_says_why(
    organism: Organism,
) -> None:
    token = add_principal(organism.operator, "ann", "worker")
    credentials = Credentials("ann", HubAccess(str(organism.operator.base_url), token))
    with XmlSender(credentials) as sender:
        first = sender.send("fast", search("one"), key="k-1", priority="high")
        assert list(first.messages) == ["fast"]
        assert sender.send("fast", etree.fromstring(search("one")), key="k-1", priority="high") == first
        (leased,) = organism.lease("fast")["messages"]
        assert (leased["sender"], leased["priority"]) == ("ann", "high")
        assert local(leased["body"].encode()) == {"query": "one"}
        again = sender.send(None, search("two"), thread=first.thread)
        assert sorted(again.messages) == ["fast", "slow"]
        assert again.thread == first.thread
        with pytest.raises(MessageRejected, match="routing") as raised:
            sender.send("nobody", search())
        assert raised.value.reason == "huh"
        with pytest.raises(UsageError, match="thread"):
            sender.send("fast", search(), thread="mine")
        with pytest.raises(UsageError, match="listener"):
            sender.send("a b", search())
    wrong = Credentials("ann", HubAccess(credentials.hub_access().url, "wrong"))
    with XmlSender(wrong) as stranger, pytest.raises(Refused):
        stranger.send("fast", search())
    with pytest.raises(UsageError, match="'hub'"):
        XmlSender(Credentials("ann"))

    async def post() -> PostedXml:
        async with AsyncXmlSender(credentials) as sender:
            with pytest.raises(MessageRejected, match="routing"):
                await sender.send(None, "<other/>")
            return await sender.send("slow", search("three"))

    assert list(asyncio.run(post()).messages) == ["slow"]
