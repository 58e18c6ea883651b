"""Event streams whose clients do not read: bounded memory, nobody waits, and the streams end."""

from __future__ import annotations

import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from schemas.settings.settings import Settings
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal, server_events
from tests.slow_readers import memory_of, percentile, seconds_of, slow_readers

MESSAGES, EVENTS = "/api/hub/messages", "/api/hub/messages/events"
MIB = 1024 * 1024
# The body limit of the tests is 256 KiB.
SIZE, COUNT = 240_000, 60


def with_gateway(settings: Settings, **changes: Any) -> Settings:
    """The settings with changes in the section `gateway`."""
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update=changes)})


def send(client: httpx.Client, recipient: str, payload: Any) -> None:
    """Send a message."""
    answer = client.post(MESSAGES, json={"recipient": recipient, "type": "note", "payload": payload})
    assert answer.is_success, answer.text


@pytest.mark.requirement("LM-22")
@pytest.mark.requirement("LM-24")
def test_streams_that_are_not_read_cost_little_memory_and_others_do_not_wait(
    start_gateway: Any, backbone_settings: Settings
) -> None:
    gateway: GatewayProcess = start_gateway(
        with_gateway(backbone_settings, answer_memory_bytes=32 * MIB, stream_unread_s=15.0)
    )
    pid = gateway.program.process.pid
    with gateway.client() as operator, ThreadPoolExecutor(2) as pool:
        names = ["ann", "bo", "cy"]
        tokens = [add_principal(operator, name, "worker") for name in names]
        for name in names:
            for number in range(COUNT):
                send(operator, name, {"n": number, "body": "x" * SIZE})
        viewer = add_principal(operator, "vi", "viewer")
        with gateway.client(tokens[0]) as ann:
            before = memory_of(pid)
            with (
                slow_readers(gateway.url, EVENTS, tokens, 12) as slow,
                slow_readers(gateway.url, "/api/hub/events", [gateway.operator_token, viewer], 8),
            ):
                posting = pool.submit(seconds_of, 100, lambda: send(operator, "operator", {}))
                for number in range(COUNT):
                    send(operator, "ann", {"n": number, "body": "y" * SIZE})
                times = posting.result(60)
                grown = max(memory_of(pid) for _ in range(5)) - before
                # Without a budget, each of 36 streams has 60 messages of 240 kB in memory: 500 MiB.
                assert grown < 200 * MIB, f"{grown / MIB:.0f} MiB"
                assert percentile(times, 95) < 1.5, times[-5:]
                # A client that reads gets its events meanwhile.
                with ann.stream("GET", EVENTS) as answer:
                    events = list(itertools.islice(server_events(answer), COUNT))
                assert [event.data["payload"]["n"] for event in events] == list(range(COUNT))
                # The others wait for memory until their turn, and end then with the reason.
                wait_until(lambda: sum(map(is_ended, slow)) >= 12, 60, "the ends of the streams")
        metrics = operator.get("/metrics").text
    assert 'door="http"' in next(line for line in metrics.splitlines() if "dropped_total{" in line)


def is_ended(connection: socket.socket) -> bool:
    """True if the gateway has ended a connection, also while its data is not read."""
    established = 1
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != established


@pytest.mark.requirement("LM-23")
def test_two_accounts_do_not_take_all_streams(start_gateway: Any, backbone_settings: Settings) -> None:
    gateway: GatewayProcess = start_gateway(with_gateway(backbone_settings, streams=64))
    with gateway.client() as operator:
        greedy = [add_principal(operator, name, "worker") for name in ("ann", "bo")]
        other = add_principal(operator, "cy", "worker")
        with slow_readers(gateway.url, EVENTS, greedy, 64) as opened:
            statuses = [one.recv(12)[9:] for one in opened]
            # The share of each depends on the order in which their requests come.
            assert 36 <= statuses.count(b"200") <= 41 and len({*statuses}) == 2
            for token in (other, gateway.operator_token):
                with gateway.client(token) as client, client.stream("GET", EVENTS) as answer:
                    assert answer.status_code == 200
        begun = time.monotonic()
        with gateway.client(greedy[0]) as ann:
            wait_until(lambda: ann.get(MESSAGES).is_success, what="the gateway")
        assert time.monotonic() - begun < 10
