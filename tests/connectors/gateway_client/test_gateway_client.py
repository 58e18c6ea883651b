"""The gateway's client: errors by status, retries that are one request, a stream that resumes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from connectors.plumbing.gateway_client.event_stream import EventStream, ServerEvent
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.plumbing.gateway_client.operator_token import read_token
from connectors.programs.local_stack import free_port
from schemas.settings.settings import GatewaySettings, Settings
from tests.broker_processes import wait_until
from trunkline_agent.errors import BackboneUnreachable, NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.hub.server_events import EventParser

TOKEN = "canary-token-4411"
Answer = tuple[int, dict[str, str], bytes]


class ScriptedServer:
    """Answers each request with the next of its answers: a stand-in for a gateway that misbehaves."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length", "0"))
                seen = {name.lower(): value for name, value in self.headers.items()}
                script.requests.append((self.command, self.path, seen, self.rfile.read(size)))
                status, headers, body = script.answers.pop(0)
                if status == 0:
                    return  # The connection just ends.
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                script.goes_on.wait(20)

            do_POST = do_GET  # noqa: N815  the library's name

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def close(self) -> None:
        self.goes_on.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    found = ScriptedServer()
    yield found
    found.close()


@pytest.fixture
def client(server: ScriptedServer, tmp_path: Path) -> Iterator[GatewayClient]:
    with GatewayClient(_settings(server.server.server_port, tmp_path), token=TOKEN) as found:
        yield found


def _settings(port: int, folder: Path) -> Settings:
    return Settings(data_dir=folder, gateway=GatewaySettings(port=port))


def _error(status: int, reason: str = "why", **headers: str) -> Answer:
    return status, headers, json.dumps({"reason": reason, "message": "because\x1b[31m"}).encode()


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [(400, UsageError, 2), (413, UsageError, 2), (401, Refused, 4), (403, Refused, 4), (409, Refused, 4),
     (404, NotFound, 3), (500, TrunklineError, 1)],
)  # fmt: skip
@pytest.mark.requirement("CM-06")
def test_each_refusal_is_an_error_with_the_gateways_words_and_nothing_a_terminal_would_obey(
    server: ScriptedServer, client: GatewayClient, status: int, error: type[TrunklineError], code: int
) -> None:
    server.answers = [_error(status)]
    with pytest.raises(error, match="because") as told:
        client.get("/api/hub/jobs")
    assert told.value.exit_code == code
    assert "\x1b" not in str(told.value)
    assert TOKEN not in str(told.value)
    assert len(server.requests) == 1


@pytest.mark.requirement("CM-04")
def test_a_post_that_got_no_answer_is_sent_again_as_the_same_request(
    server: ScriptedServer, client: GatewayClient
) -> None:
    server.answers = [(0, {}, b""), _error(503, **{"Retry-After": "0"}), (201, {}, b'{"job_id": "0a1b2c3d"}')]
    assert client.post("/api/hub/jobs", {"description": "x", "session": None}) == {"job_id": "0a1b2c3d"}
    assert len({headers["idempotency-key"] for _, _, headers, _ in server.requests}) == 1
    assert {body for *_, body in server.requests} == {b'{"description":"x"}'}
    assert all(headers["authorization"] == f"Bearer {TOKEN}" for _, _, headers, _ in server.requests)


def test_two_posts_are_two_requests_unless_they_are_named_alike(
    server: ScriptedServer, client: GatewayClient
) -> None:
    server.answers = [(200, {}, b"{}")] * 4
    for request_id in (None, None, "r-1", "r-1"):
        client.post("/x", request_id=request_id)
    keys = [headers["idempotency-key"] for _, _, headers, _ in server.requests]
    assert (len(set(keys[:2])), keys[2:]) == (2, ["r-1", "r-1"])


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


def _sse(*events: bytes) -> Answer:
    return 200, {"Content-Type": "text/event-stream"}, b"".join(events)


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


def test_a_lost_stream_goes_on_behind_the_last_event(server: ScriptedServer, client: GatewayClient) -> None:
    server.answers = [
        _sse(_event("snapshot", 5, {}), _event("settled", 6, 1)),
        (0, {}, b""),
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
    paths = [path for _, path, _, _ in server.requests]
    assert set(paths) == {"/api/hub/events?kind=job"}
    ids = [headers.get("last-event-id") for _, _, headers, _ in server.requests]
    assert ids[:4] == [None, "b-6", "b-6", "b-6"]
    assert all(value == "b-7" for value in ids[4:])


def test_a_stream_that_is_refused_is_not_tried_again(server: ScriptedServer, client: GatewayClient) -> None:
    server.answers = [_error(403)]
    with EventStream(client, "/x") as stream, pytest.raises(Refused, match="because"):
        stream.next(10)
    assert len(server.requests) == 1


def test_a_stream_gives_up_in_the_end(tmp_path: Path) -> None:
    with (
        GatewayClient(_settings(free_port(), tmp_path), token=TOKEN) as client,
        EventStream(client, "/x", give_up_s=0.3) as stream,
        pytest.raises(BackboneUnreachable),
    ):
        stream.next(20)


def test_closing_a_stream_that_is_silent_does_not_wait_for_it(
    client: GatewayClient, server: ScriptedServer
) -> None:
    body = _event("snapshot", 1, {})
    # The server keeps the connection open: it promised ten bytes more.
    headers = {"Content-Type": "text/event-stream", "Content-Length": str(len(body) + 10)}
    server.answers = [(200, headers, body)]
    server.goes_on.clear()
    with EventStream(client, "/x") as stream:
        assert stream.next(10) is not None
        started = time.monotonic()
    assert time.monotonic() - started < 3
