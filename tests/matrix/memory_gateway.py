"""A gateway in this process: all of the real one but Kafka, whose log is in memory, and background services."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from connectors.doors.mcp_tools.agents.door import AgentMcp
from connectors.hub.engine.operation import Operation
from connectors.hub.live.fold_turns import Batch
from connectors.hub.live.live_view import LiveView
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services import hub as hub_module
from connectors.hub.services.hub import Hub
from connectors.log.publisher import Append
from connectors.programs.gateway_program.application import Door, build_application
from connectors.programs.gateway_program.http_server import Budgets, HttpServer, bound_socket
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import GatewaySettings, KafkaSettings, LimitSettings, Settings
from schemas.wire.record import OutgoingRecord, Position, partition_for
from tests.broker_processes import LOOPBACK, wait_until
from tests.schemas.stream_records import as_read
from trunkline_agent.errors import BackboneUnreachable

OPERATOR_TOKEN = "operators-own-token-000000000000"
BODY_LIMIT = 64 * 1024
IDLE_S = 20
AWAY = "Kafka is away, as the test wants"
JSON = "application/json"


class MemoryLog:
    """The log, in the place of a publisher to Kafka. It settles a record at once, unless it is held or away.

    Attributes:
        records: All records that it has, with their verdicts, in order.
        is_held: Whether it answers no record, until `release`.
        is_away: Whether it has no record, and answers with an error.
        passes: The type of records that it has nevertheless.
        forgets_to_answer: Whether it has the record, and answers with an error nevertheless.
    """

    failed = False

    def __init__(self, settings: Settings, view: LiveView) -> None:
        self._view, self._partitions = view, settings.kafka.partitions
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: list[tuple[OutgoingRecord, Callable[[Any], None]]] = []
        self.records: list[tuple[OutgoingRecord, SettledRecord]] = []
        self.is_held = self.is_away = self.forgets_to_answer = False
        self.passes = ""

    def begin(self) -> None:
        """Settle records on the present event loop."""
        self._loop = asyncio.get_running_loop()

    def send(self, record: OutgoingRecord, done: Callable[[Any], None], *, may_block: bool = True) -> bool:
        """As of the publisher."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._came, record, done)
        return True

    def append(self, record: OutgoingRecord) -> Append:
        """As of the publisher."""
        append = Append()
        self.send(record, append.came_back)
        return append

    def close(self, timeout_s: float | None = None) -> None:
        """As of the publisher."""

    def offsets(self, timeout_s: float) -> dict[int, int]:
        """As of the log's end, which the view has always reached."""
        return self._view.next_offsets()

    @property
    def held(self) -> int:
        """How many records it has not answered."""
        return len(self._held)

    def release(self) -> None:
        """Answer the records that it held, and hold none from now on."""
        assert self._loop is not None
        self.is_held, held, self._held = False, self._held, []
        for one in held:
            self._loop.call_soon_threadsafe(self._came, *one)

    def _came(self, record: OutgoingRecord, done: Callable[[Any], None]) -> None:
        if record.type == self.passes:
            done(self._settled(record))
        elif self.is_held:
            self._held.append((record, done))
        elif self.is_away:
            done(BackboneUnreachable(AWAY))
        else:
            settled = self._settled(record)
            done(BackboneUnreachable(AWAY) if self.forgets_to_answer else settled)

    def _settled(self, record: OutgoingRecord) -> SettledRecord:
        partition = partition_for(record.key, self._partitions)
        offset = self._view.next_offsets()[partition]
        read = as_read(record, offset, time.time_ns() // 1000, partition)
        reached = {partition: offset + 1}
        self._view._fold(Batch(deque([read]), reached, reached))
        found = self._view.feed.find(Position(partition, offset))
        assert found is not None, self._view.failure
        self.records.append((record, found))
        return found


async def _called(*_: Any) -> SimpleNamespace:
    """As of the client that calls webhooks, whose address answers."""
    return SimpleNamespace(is_ok=True, status=204, why="", seconds=0.0)


class MemoryView(LiveView):
    """A live view that does not follow Kafka."""

    def open(self) -> None:
        """Begin with an empty store."""
        self.load()


class Answer(NamedTuple):
    """The answer to a request. `document` is its JSON."""

    status: int
    headers: dict[str, str]
    document: Any

    @property
    def verdict(self) -> str | None:
        """The verdict on what the request changed, None for none."""
        return self.headers.get("trunkline-verdict")

    @property
    def said(self) -> tuple[int, str | None]:
        """The status, and the reason of an error."""
        return self.status, self.document.get("reason") if isinstance(self.document, dict) else None


class MemoryGateway:
    """The doors HTTP and MCP over one hub.

    Attributes:
        operations: The operations of the HTTP door by their names.
        refused: The recorded refusals: reason, explanation, principal and route.
        begun: How the engine has ended the requests that it began.
    """

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(
            data_dir=folder,
            kafka=KafkaSettings(partitions=2),
            limits=LimitSettings(payload_bytes=BODY_LIMIT),
            gateway=GatewaySettings(launch_timeout_s=0.01, settle_timeout_s=5, max_attempts=2),
        )
        keyring = ensure_keyring(self.settings)
        view = MemoryView(self.settings, keyring)
        self.hub = hub = Hub(self.settings, keyring, OPERATOR_TOKEN, view)
        self.log = view._end = MemoryLog(self.settings, view)  # type: ignore[assignment]
        self.refused: list[tuple[Any, ...]] = []
        self.begun: list[str] = []
        hub.refusals.record = lambda *said, **_: self.refused.append(said)  # type: ignore[method-assign]
        hub.metrics.direct = self.begun.append  # type: ignore[method-assign]
        # No background service runs, but blobs are known by their records.
        view.on_change(hub.blobs.on_change, hub.blobs.follows)
        hub.background_services = ()
        hub.webhook_client.call = _called  # type: ignore[method-assign]
        hub.request_lines.add = lambda *_: None  # type: ignore[method-assign]
        hub.appender.open = self._open_appender  # type: ignore[method-assign]
        self.app = build_application(hub)
        self.operations: dict[str, Operation] = {one.NAME: one for one in self.app.state.operations}
        self.mcp = AgentMcp(hub)
        self.ports: list[int] = []
        self._local, self._open = threading.local(), list[HTTPConnection]()

    def _open_appender(self) -> None:
        self.hub.appender._publisher = self.log  # type: ignore[assignment]
        self.hub.appender._away = None

    async def _serve(self, ended: asyncio.Event) -> None:
        self.log.begin()
        budgets = Budgets(self.settings.gateway, 2, asyncio.get_running_loop().time)
        doors = (
            Door("hub", self.app, LOOPBACK, 0, "hub", engine=self.app.state.engine),
            Door("agent_mcp", self.mcp.app, LOOPBACK, 0, "mcp", lifespan="on", engine=self.mcp.direct),
        )
        sockets = [bound_socket(door) for door in doors]
        servers = [HttpServer(door, None, budgets, 60) for door in doors]
        async with asyncio.TaskGroup() as tasks:
            for server, one in zip(servers, sockets, strict=True):
                tasks.create_task(server.serve([one]))
            while not all(server.started for server in servers):
                await asyncio.sleep(0.005)
            self.ports = [one.getsockname()[1] for one in sockets]
            await ended.wait()
            for server in servers:
                server.should_exit = True

    @contextmanager
    def running(self) -> Iterator[MemoryGateway]:
        """Serve the doors in a thread for the length of the block."""
        nothing = {"append_noted_switch": mock.DEFAULT, "append_lacking_mac_rules": mock.DEFAULT}
        with mock.patch.multiple(hub_module, **nothing):
            self.hub.open()
        self.mcp.opened()
        loop, ended = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(self._serve(ended),))
        thread.start()
        try:
            wait_until(lambda: bool(self.ports) or not thread.is_alive(), what="the doors")
            yield self
        finally:
            for connection in self._open:
                connection.close()
            loop.call_soon_threadsafe(ended.set)
            thread.join(30)
            self.hub.close()
            loop.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        token: str = OPERATOR_TOKEN,
        *,
        careful: bool = False,
        door: int = 0,
        **headers: str,
    ) -> Answer:
        """Send a request to a door, and return its answer. The careful path serves it if `careful`.

        A body of bytes is sent as it is, and any other one as JSON.
        """
        lines = {"Host": "localhost", **headers}
        if token:
            lines["Authorization"] = f"Bearer {token}"
        if careful:
            lines["TE"] = "trailers"
        if body is not None:
            lines.setdefault("Content-Type", JSON)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self._connection(door)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in lines.items():
                connection.putheader(name, value)
            if data is not None:
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            found = connection.getresponse()
            said = found.read()
        except BaseException:
            connection.close()
            raise
        document = json.loads(said) if found.getheader("content-type", "").startswith(JSON) else said
        return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, document)

    def _connection(self, door: int) -> HTTPConnection:
        """Return this thread's connection to a door."""
        if not hasattr(self._local, "connections"):
            self._local.connections = [HTTPConnection(LOOPBACK, port, timeout=20) for port in self.ports]
            self._open += self._local.connections
            self._local.used = dict[int, float]()
        found: HTTPConnection = self._local.connections[door]
        # The gateway closes a connection that nothing was sent on for a minute.
        if time.monotonic() - self._local.used.get(door, 0) > IDLE_S:
            found.close()
        self._local.used[door] = time.monotonic()
        return found

    def accepted(self) -> int:
        """Return how many records the log has accepted."""
        return sum(settled.verdict == "accepted" for _, settled in self.log.records)
