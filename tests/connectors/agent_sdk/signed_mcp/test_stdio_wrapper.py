"""The stdio wrapper: any client that can run a command takes part, and stdout holds nothing but JSON-RPC."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import CONNECTION_CLOSED

from connectors.programs.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import wait_until
from tests.connectors.agent_sdk.signed_mcp.conftest import key_pair, write_key
from tests.connectors.agent_sdk.signed_mcp.signed_door import SignedDoor
from tests.forked_programs import forked_command
from tests.mcp_protocol import ENVELOPE, INITIALIZE
from tests.programs import run_program, start_program
from trunkline_agent.mcp import REFUSED, UNREACHABLE
from trunkline_agent.mcp.stdio_wrapper import main

pytestmark = pytest.mark.requirement("AM-10")

COMMAND = [sys.executable, "-m", "trunkline_agent.mcp"]


def environment(url: str, key: Path | str, agent: str = "ann") -> dict[str, str]:
    """Return the environment of the wrapper."""
    names = {"AGENT_ID": agent, "AGENT_KEY_PATH": str(key), "MCP_SERVER_URL": url}
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT_ROOT), **names}


class Wrapper:
    """A wrapper at work, with its input and output in our hands."""

    def __init__(self, url: str, key: Path | str, agent: str) -> None:
        command = forked_command("trunkline_agent.mcp")
        self.process = start_program(command, env=environment(url, key, agent), stdin=subprocess.PIPE)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def say(self, line: str | dict[str, Any]) -> None:
        """Write one line."""
        assert self.process.stdin is not None
        self.process.stdin.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next message; each line is one, and nothing else comes."""
        message = json.loads(self._lines.get(timeout=20))
        assert message["jsonrpc"] == "2.0"
        return message

    def ask(self, identity: int, method: str, **params: Any) -> dict[str, Any]:
        """One request of the newer protocol and its answer."""
        self.say(request(identity, method, **params))
        answer = self.hear()
        assert answer["id"] == identity
        return answer

    def end(self) -> tuple[int, str]:
        """Close the input; the exit code and what was said on stderr."""
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        said = self.process.stderr.read()
        code = self.process.wait(20)
        self._reader.join(20)
        assert self._lines.empty()
        return code, said


def request(identity: int, method: str, **params: Any) -> dict[str, Any]:
    """A request of the newer protocol, as it stands on stdio."""
    return {"jsonrpc": "2.0", "id": identity, "method": method, "params": {**params, "_meta": dict(ENVELOPE)}}


def call(identity: int, tool: str, **arguments: Any) -> dict[str, Any]:
    """A call of a tool."""
    return request(identity, "tools/call", name=tool, arguments=arguments)


@contextlib.contextmanager
def wrapped(url: str, key: Path | str, agent: str = "ann") -> Iterator[Wrapper]:
    """A wrapper that is gone when the block ends, whatever happens."""
    wrapper = Wrapper(url, key, agent)
    try:
        yield wrapper
    finally:
        wrapper.process.kill()
        wrapper.process.wait()
        wrapper._reader.join()
        for stream in (wrapper.process.stdin, wrapper.process.stdout, wrapper.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_official_client_over_stdio_runs_tools_by_either_protocol(
    mode: str, door: SignedDoor, key_file: Path
) -> None:
    async def use() -> str:
        command = StdioServerParameters(
            command=COMMAND[0], args=list(COMMAND[1:]), env=environment(door.url, key_file)
        )
        async with Client(command, mode=mode, read_timeout_seconds=20) as client:
            assert "mark_read" in [tool.name for tool in (await client.list_tools()).tools]
            for text in ("one", "grüß dich 😀", "\u2028"):
                sent = await client.call_tool("send_to_agent", {"targetAgentId": "bo", "message": text})
                assert sent.structured_content is not None
            wrong = await client.call_tool("no_such_tool", {})
            assert wrong.is_error
            return client.protocol_version

    version = anyio.run(use)
    assert (version >= "2026") == (mode == "auto")
    assert [message["content"] for message in door.mail_of("bo")] == ["one", "grüß dich 😀", "\u2028"]
    assert door.refused == []


@pytest.mark.long
def test_the_answers_of_a_closed_input_are_still_given_and_it_ends_with_nothing_else_said(
    door: SignedDoor, key_file: Path
) -> None:
    lines = [call(1, "discover_agents"), request(2, "tools/list"), call(3, "get_my_messages", unreadOnly=True)]
    done = run_program(
        forked_command("trunkline_agent.mcp"),
        timeout_s=30,
        env=environment(door.url, key_file),
        input="".join(json.dumps(line) + "\n" for line in lines),
    )
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, done.stderr) == (0, "")
    assert answers.keys() == {1, 2, 3}
    assert answers[1]["result"]["structuredContent"]["you"] == "ann"


@pytest.mark.long
def test_a_line_that_is_no_message_is_answered_and_the_next_one_goes_on(
    door: SignedDoor, key_file: Path
) -> None:
    with wrapped(door.url, key_file) as wrapper:
        for line in ("hello", "[]", "", '{"jsonrpc":"2.0"}', "\x1b[31m", '{"id":1}', "null"):
            wrapper.say(line)
            answer = wrapper.hear()
            assert (answer["id"], answer["error"]["code"]) == (None, -32700)
        assert "result" in wrapper.ask(1, "tools/list")
        version = "io.modelcontextprotocol/protocolVersion"
        for text in ("a\nb", "grün", "\x1b[31m", " x"):
            assert "error" in wrapper.ask(2, text)
            wrapper.say({"jsonrpc": "2.0", "id": 2, "method": "x", "params": {"_meta": {version: text}}})
            assert "error" in wrapper.hear()
            assert wrapper.ask(2, "tools/call", name=text)["result"]["isError"]
        assert "result" in wrapper.ask(3, "tools/list")
        assert wrapper.end() == (0, "")


@pytest.mark.long
def test_a_gateway_that_is_away_is_an_error_for_the_request_and_the_next_one_works(key_file: Path) -> None:
    door = SignedDoor(free_port(), {"ann": key_pair()[1]})
    with wrapped(door.url, key_file) as wrapper:
        away = wrapper.ask(1, "tools/list")["error"]
        assert away == {
            "code": UNREACHABLE,
            "message": "the gateway does not answer (ConnectError)",
            "data": {"reason": "unreachable"},
        }
        with door.running():
            assert "result" in wrapper.ask(2, "tools/list")
        assert wrapper.ask(3, "tools/list")["error"]["code"] == UNREACHABLE
        assert wrapper.end() == (0, "")


@pytest.mark.long
def test_a_request_that_is_open_when_the_input_ends_is_answered_with_an_error(
    door: SignedDoor, key_file: Path
) -> None:
    go_on, stalled = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        go_on.wait(20)

    door.stall = stall
    with wrapped(door.url, key_file) as wrapper:
        wrapper.say(call(1, "discover_agents"))
        assert stalled.wait(20)
        wrapper.say(call(1, "discover_agents"))
        assert wrapper.hear()["error"]["message"] == "a request with this id is open already"
        assert "result" in wrapper.ask(2, "tools/list")
        # The input ends, and the answer does not come.
        assert wrapper.process.stdin is not None
        wrapper.process.stdin.close()
        last = wrapper.hear()
        assert (last["id"], last["error"]["code"]) == (1, UNREACHABLE)
        assert "the input ended" in last["error"]["message"]
        assert wrapper.process.wait(20) == 0
        go_on.set()


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_gateway_that_hangs_up_in_the_midst_of_an_answer_is_an_error(kind: str, key_file: Path) -> None:
    def answer() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n".encode())
                connection.sendall(b"content-length: 1000\r\n\r\n{")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        thread = threading.Thread(target=answer)
        thread.start()
        with wrapped(f"http://127.0.0.1:{listener.getsockname()[1]}", key_file) as wrapper:
            for identity in (1, 2):
                assert wrapper.ask(identity, "tools/list")["error"]["code"] in (UNREACHABLE, CONNECTION_CLOSED)
            assert wrapper.end() == (0, "")
        thread.join(20)


@pytest.mark.long
def test_a_session_of_the_older_protocol_outlives_a_restart_of_the_gateway(key_file: Path) -> None:
    door = SignedDoor(free_port(), {"ann": key_pair()[1]})

    def send(number: int) -> dict[str, Any]:
        return {
            "jsonrpc": "2.0",
            "id": number,
            "method": "tools/call",
            "params": {"name": "send_to_agent", "arguments": {"targetAgentId": "bo", "message": str(number)}},
        }

    with wrapped(door.url, key_file) as wrapper:
        with door.running():
            wrapper.say({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": INITIALIZE})
            assert wrapper.hear()["result"]["protocolVersion"] == "2025-06-18"
            wrapper.say({"jsonrpc": "2.0", "method": "notifications/initialized"})
            wrapper.say(send(1))
            assert wrapper.hear()["id"] == 1
            first = door.calls()[-1].headers
        for number in (2, 4):
            wrapper.say(send(number - 1))
            assert wrapper.hear()["error"]["code"] == UNREACHABLE
            with door.running():
                # Both at once find the session gone, and one of them opens another.
                wrapper.say(send(number))
                wrapper.say(send(number + 10))
                for answer in (wrapper.hear(), wrapper.hear()):
                    assert "structuredContent" in answer["result"]
        last = door.calls()[-1].headers
        assert first["mcp-protocol-version"] == last["mcp-protocol-version"] == "2025-06-18"
        assert first["mcp-session-id"] != last["mcp-session-id"]
        assert wrapper.end()[0] == 0
    assert sum(b'"initialize"' in one.body for one in door.seen) == 3
    assert sorted(int(message["content"]) for message in door.mail_of("bo")) == [1, 2, 4, 12, 14]
    assert door.refused == []


def test_a_key_that_the_gateway_does_not_take_and_one_that_is_gone_are_errors_that_say_so(
    door: SignedDoor, tmp_path: Path
) -> None:
    other = write_key(tmp_path / "other.pem", key_pair(1)[0])
    with wrapped(door.url, other) as wrapper:
        refused = wrapper.ask(1, "tools/list")["error"]
        assert (refused["code"], refused["message"]) == (REFUSED, "the gateway answers 403: not signed")
        door.keys["ann"] = key_pair(1)[1]
        assert "result" in wrapper.ask(2, "tools/list")
        other.unlink()
        assert wrapper.ask(3, "tools/list")["error"]["data"] == {"reason": "key_unusable"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_with_nothing_said_while_its_input_is_open(
    number: int, code: int, door: SignedDoor, key_file: Path
) -> None:
    with wrapped(door.url, key_file) as wrapper:
        assert "result" in wrapper.ask(1, "tools/list")
        wrapper.process.send_signal(number)
        wait_until(lambda: wrapper.process.poll() is not None, 5, "its end")
        assert wrapper.end() == (code, "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"AGENT_ID": "", "MCP_SERVER_URL": ""}, "set AGENT_ID, MCP_SERVER_URL"),
        ({"AGENT_ID": "a/b"}, "an agent's name has letters"),
        ({"MCP_SERVER_URL": "127.0.0.1"}, "http://host:port"),
        ({"AGENT_KEY_PATH": "no/such/file"}, "cannot read the key file no/such/file: No such file"),
    ],
)
def test_what_is_wrong_with_its_environment_it_says_on_stderr(
    changes: dict[str, str], why: str, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main({**environment("http://127.0.0.1:9", key_file), **changes})
    said, complained = capsys.readouterr()
    assert (code, said) == (2, "")
    assert complained.startswith("trunkline agent: ")
    assert why in complained
    assert complained.count("\n") == 1
