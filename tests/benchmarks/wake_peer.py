"""The peer of `bench wake`: the same doors over NATS JetStream, which syncs each message to disk.

Each front is one process with the same web framework. It has the routes of the hub that send and wait, and
the MCP tools `wait_for_messages` and `mark_read` with the `mcp` package's server and the same signatures. A
wait is a request to the durable pull consumer of the mailbox, which the server of NATS answers when it has a
message. An answer has one message. A front knows tokens, keys and nothing else: no policy, no verdicts, no
repeated waits, no audit.

Run as a program it is one front. Its arguments are its port, the port of NATS, and a JSON file of tokens and
keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import nats
import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from fastapi import Depends, FastAPI, Header, HTTPException, Query
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StorageType, StreamConfig
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from connectors.programs.local_stack import free_port
from tests.benchmarks.bench_stack import served
from tests.benchmarks.hub_peer import Envelope, nats_config, nats_server, serve_app
from tests.broker_processes import LOOPBACK
from trunkline_agent.mcp import signing as agent_signing

STREAM: Final = "MAILBOX"
# A message that a killed front had taken and not acknowledged is delivered again after so long.
_ACK_WAIT_S: Final = 5.0
# Longer than the server of NATS should need to end a wait. The front then ends it itself.
_LEEWAY_S: Final = 5.0
_PUBLISH_S: Final = 20.0
_CHANGES: Final = b'"mark_read"'
_NAMES: Final = (agent_signing.AGENT_HEADER, agent_signing.TIMESTAMP_HEADER, agent_signing.SIGNATURE_HEADER)


async def make_mailboxes(nats_port: int, names: list[str]) -> None:
    """Make the stream and a durable pull consumer for each name."""
    connection = await nats.connect(f"nats://{LOOPBACK}:{nats_port}", allow_reconnect=False)
    try:
        stream = connection.jetstream()
        await stream.add_stream(
            StreamConfig(
                name=STREAM,
                subjects=["mailbox.*", "calls.*"],
                storage=StorageType.FILE,
                # The server allows 1,000 by default.
                max_consumers=2 * len(names),
            )
        )
        for name in names:
            await stream.add_consumer(
                STREAM,
                ConsumerConfig(
                    durable_name=name,
                    filter_subject=f"mailbox.{name}",
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=_ACK_WAIT_S,
                ),
            )
    finally:
        await connection.close()


class Mailboxes:
    """The mailboxes of all agents, as one front sees them. One subscription has the answers to all waits."""

    def __init__(self, connection: Nats) -> None:
        self._connection = connection
        self._stream = connection.jetstream()
        self._inbox = connection.new_inbox()
        self._numbers = itertools.count(1)
        # By name of the mailbox and number of the wait, in the order in which the waits began.
        self._waits: defaultdict[str, dict[str, asyncio.Future[Msg | None]]] = defaultdict(dict)
        # The messages that MCP agents have seen and not marked yet, by id.
        self._unread: dict[str, Msg] = {}

    async def open(self) -> None:
        """Subscribe to the answers."""
        await self._connection.subscribe(f"{self._inbox}.*.*", cb=self._answered)

    async def _answered(self, message: Msg) -> None:
        """End a wait: the one whose time is over, or for a message the oldest one of its mailbox."""
        *_, name, number = message.subject.split(".")
        if message.headers and "Status" in message.headers:
            wait = self._waits[name].pop(number, None)
            if wait is not None and not wait.done():
                wait.set_result(None)
            return
        waits = self._waits[message.subject.removeprefix("mailbox.")]
        while waits:
            wait = waits.pop(next(iter(waits)))
            if not wait.done():
                wait.set_result(message)
                return
        await message.nak()

    async def put(self, recipient: str, message: dict[str, Any]) -> None:
        """Publish, and wait until the stream has it on disk. The same id again stores nothing."""
        headers = {"Nats-Msg-Id": message["id"]}
        await self._stream.publish(f"mailbox.{recipient}", orjson.dumps(message), _PUBLISH_S, headers=headers)

    async def is_new_call(self, agent: str, signature: str) -> bool:
        """Store the signature of a call that changes something, and return whether it is the first one."""
        headers = {"Nats-Msg-Id": hashlib.sha256(signature.encode()).hexdigest()}
        found = await self._stream.publish(f"calls.{agent}", b"{}", _PUBLISH_S, headers=headers)
        return not found.duplicate

    async def next(self, name: str, wait_s: float) -> Msg | None:
        """Return the next message of a mailbox; None if none comes within `wait_s` seconds."""
        wait: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        number = str(next(self._numbers))
        self._waits[name][number] = wait
        many = {"batch": 1, "expires": int(wait_s * 1e9)} if wait_s else {"batch": 1, "no_wait": True}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}"
        try:
            await self._connection.publish(subject, orjson.dumps(many), reply=f"{self._inbox}.{name}.{number}")
            async with asyncio.timeout(wait_s + _LEEWAY_S):
                return await wait
        except TimeoutError:
            return None
        finally:
            self._waits[name].pop(number, None)

    async def take(self, name: str, wait_s: float) -> list[dict[str, Any]]:
        """Take the next message, and acknowledge it."""
        found = await self.next(name, wait_s)
        if found is None:
            return []
        await found.ack()
        return [orjson.loads(found.data)]

    async def look(self, name: str, wait_s: float) -> list[dict[str, Any]]:
        """Return the next message, which stays unread until `mark`."""
        found = await self.next(name, wait_s)
        if found is None:
            return []
        message = orjson.loads(found.data)
        self._unread[message["id"]] = found
        return [message]

    async def mark(self, message_ids: list[str]) -> int:
        """Acknowledge messages that this front has shown, and return their number."""
        found = [one for one in (self._unread.pop(message_id, None) for message_id in message_ids) if one]
        for one in found:
            await one.ack()
        return len(found)


def build(mailboxes: Mailboxes, tokens: Mapping[str, str], known: set[str]) -> FastAPI:
    """The routes of the hub."""
    app = FastAPI(docs_url=None, redoc_url=None)

    async def caller(authorization: Annotated[str, Header()] = "") -> str:
        name = tokens.get(authorization.removeprefix("Bearer "))
        if name is None:
            raise HTTPException(401)
        return name

    @app.post("/api/hub/messages")
    async def send_message(
        body: Envelope, key: Annotated[str, Header(alias="Idempotency-Key")], sender: str = Depends(caller)
    ) -> dict[str, Any]:
        if body.recipient not in known:
            raise HTTPException(404)
        message_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{sender}/{key}"))
        message = {"id": message_id, "timestamp": time.time(), "sender": sender, **body.model_dump()}
        await mailboxes.put(body.recipient, message)
        return {"delivered": True, "message_id": message_id}

    @app.get("/api/hub/messages")
    async def drain_messages(
        wait: Annotated[float, Query(ge=0, le=300)] = 0, name: str = Depends(caller)
    ) -> dict[str, Any]:
        return {"messages": await mailboxes.take(name, wait)}

    return app


class Signed:
    """ASGI middleware that lets in requests which their agent has signed, a changing call once a signature."""

    def __init__(self, app: ASGIApp, mailboxes: Mailboxes, keys: Mapping[str, str]) -> None:
        self._app, self._mailboxes = app, mailboxes
        self._keys: dict[str, Any] = {name: load_pem_public_key(pem.encode()) for name, pem in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        request = Request(scope, receive)
        body = await request.body()
        agent, timestamp, signature = (request.headers.get(name, "") for name in _NAMES)
        is_good = self._is_good(agent, timestamp, signature, body)
        if not is_good or (_CHANGES in body and not await self._mailboxes.is_new_call(agent, signature)):
            await JSONResponse({"reason": "unauthorized"}, 403)(scope, receive, send)
            return
        scope["agent"] = agent

        async def again() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)

    def _is_good(self, agent: str, timestamp: str, signature: str, body: bytes) -> bool:
        at, given = agent_signing.timestamp_seconds(timestamp), agent_signing.signature_bytes(signature)
        if agent not in self._keys or at is None or given is None:
            return False
        if abs(at - time.time()) > agent_signing.WINDOW_S:
            return False
        try:
            self._keys[agent].verify(given, timestamp.encode() + body, padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            return False
        return True


def tools(mailboxes: Mailboxes) -> StreamableHTTPSessionManager:
    """The two tools, on the server that ours uses, with the same options."""

    async def called(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        asked = params.arguments or {}
        if params.name == "mark_read":
            result: dict[str, Any] = {"marked": await mailboxes.mark(asked["messageIds"])}
        else:
            found = await mailboxes.look(context.request.scope["agent"], asked["timeoutSeconds"])
            result = {"messages": [{**one, "content": json.dumps(one["payload"])} for one in found]}
        text = types.TextContent(type="text", text=json.dumps(result))
        return types.CallToolResult(content=[text], structured_content=result)

    server: Server[Any] = Server("peer", version="1", on_call_tool=called)
    return StreamableHTTPSessionManager(server, json_response=True, stateless=True)


async def serve(port: int, nats_port: int, tokens: Mapping[str, str], keys: Mapping[str, str]) -> None:
    """Serve until a signal comes, with the settings that ours gives to uvicorn."""
    async with AsyncExitStack() as stack:
        connection = await nats.connect(f"nats://{LOOPBACK}:{nats_port}", allow_reconnect=False)
        stack.push_async_callback(connection.close)
        mailboxes = Mailboxes(connection)
        await mailboxes.open()
        app = build(mailboxes, tokens, {*tokens.values(), *keys})
        manager = tools(mailboxes)
        await stack.enter_async_context(manager.run())
        app.router.routes.append(
            Route("/mcp", Signed(StreamableHTTPASGIApp(manager), mailboxes, keys), methods=["POST"])
        )
        await serve_app(app, port)


@dataclass(frozen=True)
class Front:
    """One front: its port and its process."""

    port: int
    pid: int
    kill: Callable[[], None]


class Peer:
    """The running server of NATS, its process id, and the folder of its fronts."""

    def __init__(self, folder: Path, nats_port: int, names: Path, pid: int) -> None:
        self._folder, self._nats_port, self._names = folder, nats_port, names
        self.pid = pid

    @contextmanager
    def front(self, name: str) -> Iterator[Front]:
        """Run a front as a child of this process."""
        port = free_port()
        module = [sys.executable, "-P", "-m", "tests.benchmarks.wake_peer"]
        command = [*module, str(port), str(self._nats_port), str(self._names)]
        with served(name, command, port, self._folder) as process:
            yield Front(port, process.pid, process.kill)


@contextmanager
def peer(folder: Path, tokens: Mapping[str, str], keys: Mapping[str, str]) -> Iterator[Peer]:
    """Run NATS with a mailbox for each name as a child of this process.

    Args:
        folder: A folder to make, for all files of the peer.
        tokens: The tokens of the callers of the hub, by name.
        keys: The public keys of the agents over MCP, by name.
    """
    nats_port = free_port()
    folder.mkdir(parents=True)
    config, names = folder / "nats.conf", folder / "names.json"
    config.write_text(nats_config(nats_port, folder))
    names.touch(mode=0o600)
    names.write_text(json.dumps([{token: name for name, token in tokens.items()}, dict(keys)]))
    with served("nats", [nats_server(), "-c", config], nats_port, folder) as process:
        asyncio.run(make_mailboxes(nats_port, [*tokens, *keys]))
        yield Peer(folder, nats_port, names, process.pid)


def main(port: str, nats_port: str, names: str) -> None:
    """Run the front until SIGTERM."""
    tokens, keys = json.loads(Path(names).read_text())
    asyncio.run(serve(int(port), int(nats_port), tokens, keys))


if __name__ == "__main__":
    main(*sys.argv[1:])
