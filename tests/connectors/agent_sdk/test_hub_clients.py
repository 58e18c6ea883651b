"""The sync and the async client of the hub against a small server that answers well, badly, late and never."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from connectors.plumbing.tls_keys.tls_authority import new_authority, new_leaf
from tests.connectors.agent_sdk.hub_runners import RUNNERS, SyncRunner, running
from tests.connectors.agent_sdk.small_server import always, answer, serving
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, NotFound, RateLimited, TrunklineError, UsageError
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.hub_requests import get_json, post_json
from trunkline_agent.hub.plans import Request, Retries, exchange

NO_RETRY = Retries(patience_s=0.0)
SOME = Retries(patience_s=5.0)


@pytest.fixture(params=RUNNERS)
def kind(request):
    return request.param


@pytest.mark.requirement("AG-05")
def test_requests_after_one_another_share_a_connection(kind):
    with serving(always(answer(200, b'{"n": 1}'))) as server, running(kind, server.access) as client:
        for _ in range(3):
            assert client.run(post_json("/api/x", {"a": "ä", "b": None}, retries=NO_RETRY)) == {"n": 1}
    assert [one.connection for one in server.heard] == [1, 1, 1]
    heard = server.heard[0]
    assert (heard.method, heard.target, heard.body) == ("POST", "/api/x", '{"a":"ä"}'.encode())
    assert heard.headers["authorization"] == "Bearer the-token"
    assert len({one.headers["idempotency-key"] for one in server.heard}) == 3


@pytest.mark.requirement("AG-05")
def test_a_kept_connection_that_has_ended_is_replaced_without_a_pause(kind):
    async def close_after(heard, writer):
        writer.write(answer())
        await writer.drain()
        writer.close()

    with serving(close_after) as server, running(kind, server.access) as client:
        for number in range(3):
            client.run(get_json("/x", {"n": number, "none": None}, retries=NO_RETRY))
            time.sleep(0.05)
    assert [one.target for one in server.heard] == ["/x?n=0", "/x?n=1", "/x?n=2"]


@pytest.mark.requirement("AG-05")
def test_a_request_that_met_an_ending_connection_is_sent_again_at_once(kind):
    async def end_the_second(heard, writer):
        # The connection ends when the request is on its way, as that of a server that is restarted.
        if heard.connection == 1 and len(server.heard) == 2:
            writer.close()
            return
        writer.write(answer())

    with serving(end_the_second) as server, running(kind, server.access) as client:
        client.run(post_json("/x", {}, retries=NO_RETRY))
        client.run(post_json("/x", {}, retries=NO_RETRY))
        once = Request("POST", "/once", is_repeatable=False)
        client.run(exchange(once, NO_RETRY))
    keys = [one.headers.get("idempotency-key") for one in server.heard]
    assert [one.connection for one in server.heard] == [1, 1, 2, 2] and keys[1] == keys[2]


@pytest.mark.requirement("AG-04")
def test_a_lost_answer_is_asked_for_again_with_the_same_key(kind):
    async def cut_the_first(heard, writer):
        whole = answer(200, b'{"done": true}')
        writer.write(whole[:-4] if len(server.heard) == 1 else whole)
        if len(server.heard) == 1:
            writer.close()

    with serving(cut_the_first) as server, running(kind, server.access) as client:
        assert client.run(post_json("/x", {}, retries=SOME)) == {"done": True}
    first, second = (one.headers["idempotency-key"] for one in server.heard)
    assert first == second


@pytest.mark.requirement("AG-04")
def test_a_refused_connection_is_reported_with_the_address_after_the_patience(kind):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        began = time.monotonic()
        with running(kind, HubAccess(url)) as client, pytest.raises(BackboneUnreachable, match=url) as failed:
            client.run(get_json("/x", retries=Retries(patience_s=0.5)))
    assert time.monotonic() - began < 5 and failed.value.reason == "unreachable"


@pytest.mark.long
@pytest.mark.requirement("AG-05")
@pytest.mark.parametrize("shown", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1"])
def test_an_answer_that_does_not_end_is_a_time_out(kind, shown):
    async def stall(heard, writer):
        writer.write(shown)
        await asyncio.sleep(10)

    with (
        serving(stall) as server,
        running(kind, server.access, answer_timeout_s=0.3, connect_timeout_s=0.2) as client,
        pytest.raises(BackboneUnreachable, match="timed out"),
    ):
        client.run(get_json("/x", retries=NO_RETRY))


@pytest.mark.long
@pytest.mark.requirement("AG-05")
def test_an_answer_may_come_as_late_as_its_request_waits(kind):
    async def late(heard, writer):
        await asyncio.sleep(0.5)
        writer.write(answer())

    with (
        serving(late) as server,
        running(kind, server.access, answer_timeout_s=0.2, connect_timeout_s=0.2) as client,
    ):
        assert client.run(get_json("/x", retries=NO_RETRY, wait_s=5)) == {}


@pytest.mark.requirement("AG-05")
@pytest.mark.parametrize(
    "whole",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n[1, \r\n2\r\n2]\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Hint\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\n[1, 2]",
    ],
)
def test_chunked_and_unsized_answers_are_read_byte_by_byte(kind, whole):
    async def trickle(heard, writer):
        for place in range(len(whole)):
            writer.write(whole[place : place + 1])
            await asyncio.sleep(0)
        if b"close" in whole:
            writer.close()

    with serving(trickle) as server, running(kind, server.access) as client:
        assert client.run(get_json("/x", retries=NO_RETRY)) == [1, 2]
        assert client.run(get_json("/x", retries=NO_RETRY)) == [1, 2]
    assert server.connections == (2 if b"close" in whole else 1)


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
def test_what_is_no_http_is_an_unreachable_hub(kind, garbage):
    with (
        serving(always(garbage)) as server,
        running(kind, server.access, answer_timeout_s=0.2, connect_timeout_s=0.2) as client,
        pytest.raises(BackboneUnreachable),
    ):
        client.run(get_json("/x", retries=NO_RETRY))


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (b"", "disconnected without sending an answer"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1",
            "closed the connection before the answer was complete",
        ),
    ],
    ids=["nothing", "a part"],
)
def test_a_hub_that_closes_the_connection_before_its_answer_is_complete_is_reported_so(kind, shown, said):
    async def cut(_, writer):
        writer.write(shown)
        writer.close()

    with (
        serving(cut) as server,
        running(kind, server.access) as client,
        pytest.raises(BackboneUnreachable, match=said),
    ):
        client.run(get_json("/x", retries=NO_RETRY))


@pytest.mark.requirement("AG-04")
def test_other_json_than_a_gateways_is_reported(kind):
    with serving(always(answer(200, b"<html>"))) as server, running(kind, server.access) as client:
        with pytest.raises(TrunklineError, match="not that of a Trunkline gateway") as failed:
            client.run(get_json("/x", retries=NO_RETRY))
        assert failed.value.reason == "not_a_gateway"


@pytest.mark.long
@pytest.mark.requirement("AG-05")
def test_https_is_verified_with_the_given_authority(kind, tmp_path: Path):
    authority = new_authority()
    leaf = new_leaf(authority, "gateway", ["127.0.0.1"])
    ca, key, certificate = (tmp_path / name for name in ("ca.pem", "key.pem", "certificate.pem"))
    for place, content in (
        (ca, authority.certificate_pem),
        (key, leaf.key_pem),
        (certificate, leaf.certificate_pem),
    ):
        place.write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(always(answer()), context) as server:
        with running(kind, server.access, ca_certs=str(ca)) as client:
            for _ in range(3):
                assert client.run(get_json("/x", retries=NO_RETRY)) == {}
        assert [one.connection for one in server.heard] == [1, 1, 1]
        with running(kind, server.access) as client, pytest.raises(BackboneUnreachable, match="not trusted"):
            client.run(get_json("/x", retries=NO_RETRY))
        plain = HubAccess(server.access.url.replace("https", "http"))
        with running(kind, plain) as client, pytest.raises(BackboneUnreachable):
            client.run(get_json("/x", retries=NO_RETRY))
    with serving(always(answer())) as server:
        other = HubAccess(server.access.url.replace("http", "https"))
        hasty = running(kind, other, connect_timeout_s=0.5)
        with hasty as client, pytest.raises(BackboneUnreachable):
            client.run(get_json("/x", retries=NO_RETRY))
    with pytest.raises(UsageError, match="ca_certs"):
        SyncRunner(other, ca_certs=str(tmp_path / "none.pem"))


@pytest.mark.requirement("AG-05")
def test_a_path_before_the_api_is_kept(kind):
    with serving(always(answer())) as server:
        access = HubAccess(f"{server.access.url}/trunkline/")
        with running(kind, access) as client:
            client.run(get_json("/api/hub/x", retries=NO_RETRY))
    assert server.heard[0].target == "/trunkline/api/hub/x"


@pytest.mark.requirement("AG-04")
def test_a_long_body_that_is_refused_early_gives_the_refusal():
    async def refuse(heard, writer):
        raise AssertionError("the body was read")

    def run() -> None:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(answer(413, b'{"reason": "too_large", "message": "too long"}', "Connection: close"))
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.3)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        with running("sync", HubAccess(f"http://127.0.0.1:{listener.getsockname()[1]}")) as client:
            request = Request("PUT", "/x", body=b"x" * 30_000_000)
            with pytest.raises(UsageError, match="too long") as failed:
                client.run(exchange(request, NO_RETRY))
        thread.join()
    assert failed.value.reason == "too_large"


@pytest.mark.requirement("AG-05")
def test_close_ends_what_other_threads_wait_for():
    async def stall(heard, writer):
        got.set()
        await asyncio.sleep(10)

    got, errors = threading.Event(), []

    def wait(plan) -> None:
        try:
            client.run(plan)
        except TrunklineError as error:
            errors.append(error.reason)

    with serving(stall) as server, running("sync", server.access) as client:
        threads = [threading.Thread(target=wait, args=(get_json("/x", retries=SOME, wait_s=60),))]
        threads[0].start()
        assert got.wait(5)
        began = time.monotonic()
        client.close()
        threads[0].join(5)
        with pytest.raises(TrunklineError, match="is closed"):
            client.run(get_json("/x", retries=SOME))
    assert errors == ["closed"] and time.monotonic() - began < 3


@pytest.mark.long
@pytest.mark.requirement("AG-06")
def test_a_stream_gives_its_parts_as_they_come_and_its_error(kind):
    async def stream(heard, writer):
        if heard.target == "/none":
            writer.write(answer(404, b'{"reason": "not_found", "message": "no such stream"}'))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for text in (b": ping\n\n", b'event: message\nid: 7\ndata: {"a":\ndata: 1}\n\nda', b"ta: 2\n\n"):
            writer.write(b"%x\r\n%s\r\n" % (len(text), text))
            await writer.drain()
            await asyncio.sleep(0.02)
        if heard.target == "/ends":
            writer.write(b"0\r\n\r\n")
        elif heard.target == "/cut":
            writer.close()
        else:
            await asyncio.sleep(10)

    with serving(stream) as server, running(kind, server.access) as client:
        first, second = client.events(Request("GET", "/ends"), 5)
        assert (first.name, first.id, first.json(), second.json()) == ("message", "7", {"a": 1}, 2)
        assert len(client.events(Request("GET", "/stays"), 2)) == 2
        assert b"".join(client.parts(Request("GET", "/ends"))).endswith(b"data: 2\n\n")
        with pytest.raises(NotFound, match="no such stream"):
            list(client.parts(Request("GET", "/none")))
        with pytest.raises(BackboneUnreachable):
            list(client.parts(Request("GET", "/cut")))
        began = time.monotonic()
        with pytest.raises(BackboneUnreachable, match="timed out"):
            list(client.parts(Request("GET", "/stays"), silence_s=0.3))
        assert time.monotonic() - began < 3


@pytest.mark.requirement("AG-04")
def test_too_many_requests_end_as_rate_limited_when_the_hub_asks_for_more_than_the_patience(kind):
    refusal = answer(429, b'{"reason": "mailbox_full", "message": "the mailbox is full"}', "Retry-After: 7")
    with (
        serving(always(refusal)) as server,
        running(kind, server.access) as client,
        pytest.raises(RateLimited, match="is full") as failed,
    ):
        client.run(post_json("/x", {}, retries=SOME))
    assert (failed.value.reason, failed.value.retry_after_s, len(server.heard)) == ("mailbox_full", 7, 1)


@pytest.mark.requirement("AG-06")
def test_a_slow_reader_of_an_async_stream_gets_what_has_come_meanwhile():
    async def stream(heard, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        for _ in range(50):
            writer.write(b"%x\r\n%s\r\n" % (100_000, b"x" * 100_000))
            await writer.drain()
        await asyncio.sleep(10)

    async def read() -> None:
        async with AsyncHubClient(server.access) as client:
            found = 0
            async for part in client.parts(Request("GET", "/x"), silence_s=5):
                found += len(part)
                await asyncio.sleep(0.3 if found < 4 else 0.001)
                if found == 5_000_003:
                    break

    began = time.monotonic()
    with serving(stream) as server:
        asyncio.run(read())
    assert time.monotonic() - began < 4.5
