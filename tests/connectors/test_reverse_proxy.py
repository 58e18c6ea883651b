"""The gateway behind a proxy that does TLS for it: hub, streams and MCP at the proxy's address.

The proxy hands on what it reads as it is, the Host that the client asked for included, as many do by default.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from connectors.gateway_client.event_stream import EventStream
from connectors.gateway_client.gateway_client import GatewayClient
from connectors.tls_keys.tls_files import TlsFolder, create
from schemas.settings.settings import Settings
from tests.broker_processes import LOOPBACK, free_port, wait_until
from tests.connectors.agent_mcp.conftest import Agent, McpGateway
from tests.connectors.gateway.hub_access import starting
from trunkline_agent.mcp import agent_client

# Loopback as well, and not an address that the gateway knows of itself.
PROXY_HOST = "127.0.0.2"
CHUNK = 64 * 1024
MESSAGES = "/api/hub/messages"


class TlsProxy:
    """Takes TLS on a free port and hands on what is in it to the port `target`, on a thread of its own."""

    def __init__(self, certificate: TlsFolder) -> None:
        self.port, self.target = free_port(), 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        files = certificate.of("gateway")
        self._context.load_cert_chain(files.certificate, files.key)
        self._loop, self._started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )
        self._thread.start()
        assert self._started.wait(10)

    @property
    def url(self) -> str:
        """Its address."""
        return f"https://{PROXY_HOST}:{self.port}"

    def close(self) -> None:
        """End it and its connections."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = await asyncio.start_server(self._accepted, PROXY_HOST, self.port, ssl=self._context)
        self._started.set()
        await self._ended.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection(LOOPBACK, self.target)
        try:
            await asyncio.gather(self._pass_on(reader, onward), self._pass_on(back, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            onward.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


@pytest.fixture
def proxied(backbone_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """The settings of who comes through the proxies, with a gateway behind them that speaks plain HTTP."""
    monkeypatch.setenv("NO_PROXY", PROXY_HOST)
    tls = create(tmp_path / "tls", [PROXY_HOST])
    hub, mcp = TlsProxy(tls), TlsProxy(tls)
    sections = {
        "gateway": {"url": hub.url, "ca_certs": tls.of("ca").certificate},
        "agent_mcp": {"url": mcp.url},
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
