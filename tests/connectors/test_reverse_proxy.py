"""The gateway behind a proxy that does TLS for it: hub, streams and MCP at the proxy's address.

The proxy hands on what it reads as it is, the Host that the client asked for included, as many do by default.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from connectors.plumbing.gateway_client.event_stream import EventStream
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.plumbing.tls_keys.tls_files import create
from schemas.settings.settings import Settings
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import starting
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.tcp_proxy import TcpProxy
from trunkline_agent.mcp import agent_client

# Loopback as well, and not an address that the gateway knows of itself.
PROXY_HOST = "127.0.0.2"
MESSAGES = "/api/hub/messages"


@pytest.fixture
def proxied(backbone_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """The settings of who comes through the proxies, with a gateway behind them that speaks plain HTTP."""
    monkeypatch.setenv("NO_PROXY", PROXY_HOST)
    tls = create(tmp_path / "tls", [PROXY_HOST])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.of("gateway").certificate, tls.of("gateway").key)
    hub, mcp = (TcpProxy(socket.create_server((PROXY_HOST, 0)), target=0, context=context) for _ in range(2))
    sections = {
        "gateway": {"url": f"https://{PROXY_HOST}:{hub.port}", "ca_certs": tls.of("ca").certificate},
        "agent_mcp": {"url": f"https://{PROXY_HOST}:{mcp.port}"},
    }
    changed = {name: getattr(backbone_settings, name).model_copy(update=to) for name, to in sections.items()}
    settings = backbone_settings.model_copy(update=changed)
    try:
        with starting(McpGateway, settings, tmp_path) as start:
            gateway = start()
            hub.target, mcp.target = (int(url.rpartition(":")[2]) for url in (gateway.url, gateway.mcp_url))
            yield settings
    finally:
        hub.close()
        mcp.close()


def test_streams_and_large_bodies_go_through_a_proxy_that_does_tls(proxied: Settings) -> None:
    almost_all = "x" * (proxied.limits.payload_bytes - 4096)
    message = {"recipient": "operator", "type": "large", "payload": {"text": almost_all}}
    with GatewayClient(proxied) as gateway, EventStream(gateway, "/api/hub/events") as events:
        assert events.first(10).name == "snapshot"
        sent = [gateway.post(MESSAGES, message, request_id="once") for _ in range(2)]
        assert sent[0] == sent[1]

        def told() -> bool:
            event = events.next(1)
            return event is not None and sent[0]["message_id"] in json.dumps(event.data)

        wait_until(told, what="the stream tells of the message")
        drained = [gateway.get(MESSAGES, headers={"X-Request-ID": "drain"})["messages"] for _ in range(2)]
        assert drained[0] == drained[1]
        assert [one["payload"] for one in drained[0]] == [message["payload"]]


@pytest.mark.requirement("AM-10")
@pytest.mark.parametrize("transport", ["http", "sse"])
def test_a_signed_agent_calls_tools_at_the_proxys_address(
    transport: Literal["http", "sse"], proxied: Settings, tmp_path: Path
) -> None:
    ann = Agent("ann", tmp_path)
    with GatewayClient(proxied) as gateway:
        gateway.post("/api/hub/participants", {"agent_name": ann.name, "public_key": ann.public_key})

        async def write() -> Any:
            url, ca_certs = proxied.mcp_server_url, proxied.gateway.ca_certs
            async with agent_client(
                url, ann.name, ann.key_path, transport=transport, ca_certs=ca_certs
            ) as client:
                arguments = {"targetAgentId": "operator", "message": "from outside"}
                return await client.call_tool("send_to_agent", arguments)

        result = asyncio.run(write())
        assert not result.is_error, result
        assert [one["sender"] for one in gateway.get(MESSAGES)["messages"]] == ["ann"]
