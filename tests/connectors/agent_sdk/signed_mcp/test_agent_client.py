"""The agent's client: signed by the key in its file, over both transports, through outages and rotations."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client, MCPError
from mcp.types import REQUEST_TIMEOUT

from connectors.programs.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT
from tests.connectors.agent_sdk.signed_mcp.conftest import key_pair, write_key
from tests.connectors.agent_sdk.signed_mcp.signed_door import SignedDoor
from tests.forked_programs import forked_command
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError, UsageError
from trunkline_agent.mcp import (
    KEY_UNUSABLE,
    REFUSED,
    UNREACHABLE,
    AgentKey,
    KeyFileError,
    SignedAuth,
    agent_client,
    signed_auth,
)
from trunkline_agent.mcp.http_client import AgentHttpClient, endpoint, with_nonce
from trunkline_agent.mcp.signed_auth import SigningTimes
from trunkline_agent.mcp.signing import public_pem

pytestmark = pytest.mark.requirement("AM-10")

TRANSPORTS = ("http", "sse")
SEND = ("send_to_agent", {"targetAgentId": "bo", "message": "hi"})


def with_client(use: Callable[[Client], Awaitable[Any]], url: str, key: Path, **options: Any) -> Any:
    """Return the result of `use` for a client of `ann`."""

    async def connected() -> Any:
        async with agent_client(url, "ann", key, **options) as client:
            return await use(client)

    return anyio.run(connected)


async def send(client: Client) -> dict[str, Any]:
    """Write to `bo`."""
    result = await client.call_tool(*SEND)
    assert not result.is_error
    assert result.structured_content is not None
    assert json.loads(result.content[0].text) == result.structured_content  # type: ignore[union-attr]
    return result.structured_content


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_official_client_runs_tools_and_each_of_its_requests_is_signed_anew(
    transport: str, door: SignedDoor, key_file: Path
) -> None:
    async def use(client: Client) -> list[str]:
        for _ in range(3):
            await send(client)
        found = await client.call_tool("discover_agents", {})
        assert found.structured_content == {"agents": ["ann"], "you": "ann"}
        return [tool.name for tool in (await client.list_tools()).tools]

    assert "get_my_messages" in with_client(use, door.url, key_file, transport=transport)
    assert door.refused == []
    assert len(door.mail_of("bo")) == 3
    assert len({(one.timestamp, one.body) for one in door.calls()}) == 4
    assert {one.agent for one in door.seen} == {"ann"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_key_that_the_gateway_does_not_take_is_refused_at_entry(
    transport: str, door: SignedDoor, tmp_path: Path
) -> None:
    other = write_key(tmp_path / "other.pem", key_pair(1)[0])
    with pytest.raises(Refused, match="the gateway answers 403"):
        with_client(send, door.url, other, transport=transport)
    assert set(door.refused) == {"wrong signature"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gateway_that_is_not_there_is_said_at_entry(transport: str, key_file: Path) -> None:
    with pytest.raises(BackboneUnreachable):
        with_client(send, f"http://127.0.0.1:{free_port()}", key_file, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_address_with_no_such_server_is_said_at_entry(
    transport: str, door: SignedDoor, key_file: Path
) -> None:
    with pytest.raises(TrunklineError) as error:
        with_client(send, f"{door.url}/nothing", key_file, transport=transport)
    assert type(error.value) is TrunklineError


@pytest.mark.long
def test_a_gateway_that_is_away_fails_the_call_alone_and_the_client_goes_on(key_file: Path) -> None:
    door = SignedDoor(free_port(), {"ann": key_pair()[1]})

    async def use(client: Client) -> None:
        await send(client)
        await anyio.to_thread.run_sync(run.__exit__, None, None, None)
        with pytest.raises(MCPError, match="the gateway does not answer") as away:
            await client.call_tool(*SEND)
        assert (away.value.code, away.value.data) == (UNREACHABLE, {"reason": "unreachable"})
        with door.running():
            await send(client)

    run = door.running()
    run.__enter__()
    with_client(use, door.url, key_file)
    assert len(door.mail_of("bo")) == 2


def test_a_call_that_is_not_answered_ends_after_its_time(door: SignedDoor, key_file: Path) -> None:
    go_on = threading.Event()
    door.stall = go_on.wait

    async def use(client: Client) -> int:
        with pytest.raises(MCPError) as late:
            await client.call_tool("discover_agents", {})
        go_on.set()
        return late.value.code

    assert with_client(use, door.url, key_file, call_s=0.3) == REQUEST_TIMEOUT


def test_a_gateway_that_takes_a_request_and_is_silent_is_away(key_file: Path) -> None:
    async def asked(url: str) -> httpx2.Response:
        async with AgentHttpClient(url, SignedAuth("ann", AgentKey(key_file)), read_s=0.2) as http:
            return await http.post(url, json={"method": "tools/list"})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = anyio.run(asked, f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the gateway does not answer (ReadTimeout)"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_of_the_caller_leaves_the_client_as_it_is(
    transport: str, door: SignedDoor, key_file: Path
) -> None:
    class OurOwn(Exception):
        pass

    async def use(_: Client) -> None:
        raise OurOwn

    with pytest.raises(OurOwn):
        with_client(use, door.url, key_file, transport=transport)

    async def call(client: Client) -> None:
        await client.session.send_ping()

    with pytest.raises(MCPError):
        with_client(call, door.url, key_file, transport=transport)


def test_a_proxy_of_the_environment_does_not_stand_before_loopback(
    door: SignedDoor, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with_client(send, door.url, key_file)


@pytest.mark.long
@pytest.mark.requirement("AM-02")
def test_equal_calls_of_two_processes_of_one_agent_at_one_moment_are_no_replay(
    door: SignedDoor, key_file: Path
) -> None:
    both = [
        subprocess.Popen(
            [*forked_command("tests.connectors.agent_sdk.signed_mcp.one_call"), door.url, str(key_file)],
            cwd=PROJECT_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.communicate("go\n", timeout=30)
        assert process.returncode == 0
    assert (door.refused, len(door.mail_of("bo"))) == ([], 2)
    first, second = (json.loads(one.body) for one in door.calls())
    assert first["id"] == second["id"]
    assert first["params"]["arguments"] == second["params"]["arguments"]
    assert first["params"]["_meta"] != second["params"]["_meta"]


@pytest.mark.requirement("AM-02")
def test_the_same_bytes_twice_in_a_second_are_signed_for_two_seconds_in_one_process(
    door: SignedDoor, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(signed_auth.time.time())
    monkeypatch.setattr(signed_auth.time, "time", lambda: float(now))
    body = json.dumps({"method": "tools/call"})
    key = AgentKey(key_file)
    times = SigningTimes()
    for _ in range(2):
        with httpx2.Client(auth=SignedAuth("ann", key, times), trust_env=False) as http:
            http.post(door.url, content=body)
            http.get(door.url)
    assert door.refused == []
    assert [int(one.timestamp) - now for one in door.seen] == [0, 0, 1, 0]
    # Another process knows nothing of it: this is what the nonce is for.
    with httpx2.Client(auth=SignedAuth("ann", key, SigningTimes()), trust_env=False) as http:
        assert http.post(door.url, content=body).status_code == 403
    assert door.refused == ["replay"]


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(-3, 3)), max_size=60))
def test_no_body_is_signed_twice_for_one_second_wherever_the_clock_goes(
    steps: list[tuple[bytes, int]],
) -> None:
    times, now, given_times = SigningTimes(), 1_000_000, set()
    for body, step in steps:
        now += max(step, 1_000_000 - now)
        at = times.next_for("ann", body, now)
        assert now <= at <= now + 120
        assert (body, at) not in given_times
        given_times.add((body, at))


def test_a_call_made_too_often_in_a_second_is_refused_and_what_is_past_is_forgotten() -> None:
    times = SigningTimes()
    assert [times.next_for("ann", b"x", 1000) for _ in range(121)] == list(range(1000, 1121))
    with pytest.raises(Refused, match="idempotencyKey"):
        times.next_for("ann", b"x", 1000)
    assert times.next_for("bo", b"x", 1000) == 1000
    assert times.next_for("ann", b"x", 1001) == 1121
    for number in range(50):
        times.next_for("ann", b"%d" % number, 2000)
    times.next_for("ann", b"x", 2100)
    assert len(times._last) == 1


def test_a_nonce_is_put_into_calls_of_tools_alone_and_leaves_the_message_as_it_was() -> None:
    call = {"method": "tools/call", "params": {"name": "x", "_meta": {"progressToken": 1}}}
    made = [with_nonce(call) for _ in range(2)]
    assert made[0] != made[1]
    assert made[0]["params"]["_meta"].keys() == {"progressToken", "trunkline/nonce"}
    assert call == {"method": "tools/call", "params": {"name": "x", "_meta": {"progressToken": 1}}}
    for other in ({"method": "tools/list", "params": {}}, {"method": "tools/call"}, {"result": {}}):
        assert with_nonce(other) is other


@pytest.mark.long
def test_a_key_is_read_again_when_its_file_was_replaced(door: SignedDoor, key_file: Path) -> None:
    async def use(client: Client) -> None:
        await send(client)
        write_key(key_file, key_pair(1)[0])
        with pytest.raises(MCPError, match="the gateway answers 403") as refused:
            await client.call_tool(*SEND)
        assert refused.value.code == REFUSED
        door.keys["ann"] = key_pair(1)[1]
        await send(client)

    with_client(use, door.url, key_file)


def test_a_key_file_that_is_gone_or_open_to_others_fails_the_call_until_it_is_right_again(
    door: SignedDoor, key_file: Path
) -> None:
    async def use(client: Client) -> None:
        for change, undo in (
            (lambda: key_file.chmod(0o640), lambda: key_file.chmod(0o600)),
            (lambda: key_file.rename(f"{key_file}.away"), lambda: Path(f"{key_file}.away").rename(key_file)),
        ):
            change()
            with pytest.raises(MCPError, match="key file") as unusable:
                await client.call_tool(*SEND)
            assert unusable.value.code == KEY_UNUSABLE
            undo()
            await send(client)

    with_client(use, door.url, key_file)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o610, 0o666])
def test_a_key_file_that_others_may_open_is_not_used(mode: int, key_file: Path) -> None:
    assert public_pem(AgentKey(key_file).current()) == key_pair()[1]
    key_file.chmod(mode)
    with pytest.raises(KeyFileError, match=rf"readable by others \(mode {mode:04o}, .*; run: chmod 600"):
        AgentKey(key_file).current()


def test_what_is_no_key_file_is_refused_without_showing_what_it_holds(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("canary.pem", "pipe", "missing"):
        if name == "canary.pem":
            write_key(tmp_path / name, b"-----BEGIN canary-7f3e")
        with pytest.raises(KeyFileError) as error:
            AgentKey(tmp_path / name).current()
        assert "canary-7f3e" not in str(error.value)
    for folder in (tmp_path, "no\0path"):
        with pytest.raises(KeyFileError):
            AgentKey(folder).current()


def test_a_base_address_gets_the_path_of_the_door_and_what_is_no_address_is_refused() -> None:
    assert endpoint("http://127.0.0.1:3100", "/mcp") == "http://127.0.0.1:3100/mcp"
    assert endpoint("http://127.0.0.1:3100/", "/sse") == "http://127.0.0.1:3100/sse"
    assert endpoint("https://h/door/mcp", "/mcp") == "https://h/door/mcp"
    for other in (
        "",
        "127.0.0.1:3100",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:0",
        "http://h/a b",
        "http://é",
    ):
        with pytest.raises(UsageError):
            endpoint(other, "/mcp")
    for name in ("", "a/b", "a\nb", "é", "a" * 129):
        with pytest.raises(UsageError):
            SignedAuth(name, AgentKey("none"))
