"""The gateway's client: errors by status, retries that are one request, a stream that resumes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from connectors.plumbing.gateway_client.event_stream import EventStream, ServerEvent
from connectors.plumbing.gateway_client.gateway_access import read_token
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.programs.local_stack import free_port
from schemas.settings.settings import GatewaySettings, Settings
from tests.broker_processes import wait_until
from tests.connectors.agent_sdk.small_server import Heard, SmallServer, answer, serving
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.hub.http_exchange import EventParser

TOKEN = "canary-token-4411"


class ScriptedServer:
    """A gateway that misbehaves: it answers each request with the next of its answers; an empty one is none.

    While `goes_on` is not set, it keeps the connection open after an answer.
    """

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    async def answer(self, _: Heard, writer: asyncio.StreamWriter) -> None:
        """Answer, and end the connection."""
        writer.write(self.answers.pop(0))
        await writer.drain()
        while not self.goes_on.is_set():
            await asyncio.sleep(0.02)
        writer.close()


@pytest.fixture
def script() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def server(script: ScriptedServer) -> Iterator[SmallServer]:
    with serving(script.answer) as found:
        yield found
        script.goes_on.set()


@pytest.fixture
def client(server: SmallServer, tmp_path: Path) -> Iterator[GatewayClient]:
    with GatewayClient(_settings(server.port, tmp_path), token=TOKEN) as found:
        yield found


def _settings(port: int, folder: Path) -> Settings:
    return Settings(data_dir=folder, gateway=GatewaySettings(port=port))


def _error(status: int, *headers: str) -> bytes:
    return answer(status, json.dumps({"reason": "why", "message": "because\x1b[31m"}).encode(), *headers)


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [(400, UsageError, 2), (413, UsageError, 2), (401, Refused, 4), (403, Refused, 4), (409, Refused, 4),
     (404, NotFound, 3), (500, TrunklineError, 1)],
)  # fmt: skip
@pytest.mark.requirement("CM-06")
def test_each_refusal_is_an_error_with_the_gateways_words_and_nothing_a_terminal_would_obey(
    server: SmallServer,
    script: ScriptedServer,
    client: GatewayClient,
    status: int,
    error: type[TrunklineError],
    code: int,
) -> None:
    script.answers = [_error(status)]
    with pytest.raises(error, match="because") as told:
        client.get("/api/hub/jobs")
    assert told.value.exit_code == code
    assert "\x1b" not in str(told.value)
    assert TOKEN not in str(told.value)
    assert len(server.heard) == 1


@pytest.mark.long
@pytest.mark.requirement("CM-04")
def test_a_post_that_got_no_answer_is_sent_again_as_the_same_request(
    server: SmallServer, script: ScriptedServer, client: GatewayClient
) -> None:
    script.answers = [b"", _error(503, "Retry-After: 0"), answer(201, b'{"job_id": "0a1b2c3d"}')]
    assert client.post("/api/hub/jobs", {"description": "x", "session": None}) == {"job_id": "0a1b2c3d"}
    assert len({one.headers["idempotency-key"] for one in server.heard}) == 1
    assert {one.body for one in server.heard} == {b'{"description":"x"}'}
    assert all(one.headers["authorization"] == f"Bearer {TOKEN}" for one in server.heard)


def test_two_posts_are_two_requests_unless_they_are_named_alike(
    server: SmallServer, script: ScriptedServer, client: GatewayClient
) -> None:
    script.answers = [answer()] * 4
    for request_id in (None, None, "r-1", "r-1"):
        client.post("/x", request_id=request_id)
    keys = [one.headers["idempotency-key"] for one in server.heard]
    assert (len(set(keys[:2])), keys[2:]) == (2, ["r-1", "r-1"])


@pytest.mark.long
def test_a_gateway_that_is_not_there_is_exit_code_5_and_says_what_to_do(tmp_path: Path) -> None:
    with GatewayClient(_settings(free_port(), tmp_path), token=TOKEN) as client:
        assert client.answers() is False
        with pytest.raises(BackboneUnreachable, match="trunkline up") as told:
            client.get("/api/hub/jobs")
    assert told.value.exit_code == 5


@pytest.mark.requirement("CM-05")
def test_the_token_comes_from_the_environment_else_from_a_file_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRUNKLINE_TOKEN", raising=False)
    settings = _settings(1, tmp_path)
    assert read_token(settings) is None
    file = settings.operator_token_file
    file.parent.mkdir(parents=True)
    file.write_text("from-the-file\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_token(settings)
    file.chmod(0o600)
    assert read_token(settings) == "from-the-file"
    monkeypatch.setenv("TRUNKLINE_TOKEN", "from the environment")
    with pytest.raises(UsageError, match="no token") as told:
        read_token(settings)
    assert "from the environment" not in str(told.value)
    monkeypatch.setenv("TRUNKLINE_TOKEN", "from-the-environment")
    assert read_token(settings) == "from-the-environment"


def _event(name: str, number: int, data: object) -> bytes:
    return f"event: {name}\nid: b-{number}\ndata: {json.dumps(data)}\n\n".encode()


def _sse(*events: bytes) -> bytes:
    return answer(200, b"".join(events), "Content-Type: text/event-stream")


def parsed(pieces: Iterable[bytes]) -> list[ServerEvent]:
    """Return the events of a stream whose body arrives in these pieces."""
    parser = EventParser()
    return [ServerEvent(event.name, event.json(), event.id) for one in pieces for event in parser.feed(one)]


def test_events_are_read_whole_however_they_are_cut_and_whatever_stands_in_them() -> None:
    text = "line\u2028break \x85 \x0b \r in"
    wire = b": ping\r\n\r\n" + _event("settled", 1, {"a": 1}).replace(b"\n", b"\r\n")
    wire += ("event: settled\nid: b-2\ndata: " + json.dumps(text, ensure_ascii=False) + "\n\n").encode()
    wire += b"data: 1\ndata:  2\n\n".replace(b"1\n", b"[1,\n").replace(b" 2\n", b"2]\n")
    wire += b"event: settled\ndata: 3\n"  # ends in the middle
    wanted = [
        ServerEvent("settled", {"a": 1}, "b-1"),
        ServerEvent("settled", text, "b-2"),
        ServerEvent("message", [1, 2], None),
    ]
    for size in (1, 7, len(wire)):
        cut = (wire[i : i + size] for i in range(0, len(wire), size))
        assert parsed(cut) == wanted


@pytest.mark.long
def test_a_lost_stream_goes_on_behind_the_last_event(
    server: SmallServer, script: ScriptedServer, client: GatewayClient
) -> None:
    script.answers = [
        _sse(_event("snapshot", 5, {}), _event("settled", 6, 1)),
        b"",
        _error(503),
        _sse(_event("settled", 7, 2)),
        *[_error(503)] * 50,
    ]
    told: list[str | None] = []
    with EventStream(client, "/api/hub/events", {"kind": "job", "type": None}, lost=told.append) as stream:
        found = [wait_until(lambda: stream.next(0.1), what="an event") for _ in range(3)]
        assert [(e.name, e.data) for e in found] == [("snapshot", {}), ("settled", 1), ("settled", 2)]
    assert told[:2] == [told[0], None]
    assert told[0] is not None
    assert {one.target for one in server.heard} == {"/api/hub/events?kind=job"}
    ids = [one.headers.get("last-event-id") for one in server.heard]
    assert ids[:4] == [None, "b-6", "b-6", "b-6"]
    assert all(value == "b-7" for value in ids[4:])


def test_a_stream_that_is_refused_is_not_tried_again(
    server: SmallServer, script: ScriptedServer, client: GatewayClient
) -> None:
    script.answers = [_error(403)]
    with EventStream(client, "/x") as stream, pytest.raises(Refused, match="because"):
        stream.next(10)
    assert len(server.heard) == 1


def test_a_stream_gives_up_in_the_end(tmp_path: Path) -> None:
    with (
        GatewayClient(_settings(free_port(), tmp_path), token=TOKEN) as client,
        EventStream(client, "/x", give_up_s=0.3) as stream,
        pytest.raises(BackboneUnreachable),
    ):
        stream.next(20)


def test_closing_a_stream_that_is_silent_does_not_wait_for_it(
    client: GatewayClient, script: ScriptedServer
) -> None:
    # The server promises ten bytes more, and keeps the connection open.
    script.answers = [_sse(_event("snapshot", 1, {}), b" " * 10)[:-10]]
    script.goes_on.clear()
    with EventStream(client, "/x") as stream:
        assert stream.next(10) is not None
        started = time.monotonic()
    assert time.monotonic() - started < 3
