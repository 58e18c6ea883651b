"""The peer of `bench hub`: the same FastAPI front over NATS JetStream, which syncs each message to disk.

A send is a publish that waits for the acknowledgement of the stream; a drain is a fetch of a durable pull
consumer and an acknowledgement of each message, which nobody waits for. It knows tokens and nothing else: no
policy, no verdicts, no repeated drain, no audit. Run as a program it is the front; `peer` runs both processes.

Its arguments are its port, the port of NATS and a JSON file of tokens and names.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import nats
import orjson
import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Query
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, StorageType, StreamConfig
from pydantic import BaseModel, ConfigDict, Field

from connectors.programs.local_stack import free_port
from tests.benchmarks.bench_stack import Server, served
from tests.broker_processes import LOOPBACK

STREAM = "MAILBOX"
FETCH_S = 10.0
_CONFIG = """\
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{folder}", sync_interval: always }}
"""


class Envelope(BaseModel):
    """A message to somebody, with the limits of ours."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipient: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
    type: Annotated[str, Field(min_length=1, max_length=64)]
    payload: Any = None


class Mailboxes:
    """The mailboxes of all agents in one stream, a durable pull consumer each."""

    def __init__(self, connection: Client) -> None:
        self._connection = connection
        self._stream = connection.jetstream()
        self._answers: dict[str, Subscription] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._turns

    async def open(self, names: list[str]) -> None:
        """Make the stream and the consumers."""
        await self._stream.add_stream(
            StreamConfig(name=STREAM, subjects=["mailbox.*"], storage=StorageType.FILE)
        )
        for name in names:
            mailbox = ConsumerConfig(
                durable_name=name, filter_subject=f"mailbox.{name}", ack_policy=AckPolicy.EXPLICIT
            )
            await self._stream.add_consumer(STREAM, mailbox)
            self._answers[name] = await self._connection.subscribe(self._connection.new_inbox())
            self._turns[name] = asyncio.Lock()

    async def put(self, recipient: str, message: dict[str, Any]) -> None:
        """Publish, and wait until the stream has it on disk."""
        await self._stream.publish(f"mailbox.{recipient}", orjson.dumps(message))

    async def take(self, name: str, limit: int) -> list[dict[str, Any]]:
        """Fetch what is there without waiting for more, and acknowledge it.

        The fetch of nats-py always waits when nothing is there, and leaves requests behind that delay the next
        fetch by its whole time limit. So this asks the consumer itself.
        """
        answers = self._answers[name]
        found: list[Msg] = []
        async with self._turns[name]:
            request = orjson.dumps({"batch": limit, "no_wait": True})
            await self._connection.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}", request, reply=answers.subject
            )
            while len(found) < limit:
                message = await answers.next_msg(FETCH_S)
                if message.headers and "Status" in message.headers:  # that was all
                    break
                found.append(message)
            for message in found:
                await message.ack()
        return [orjson.loads(message.data) for message in found]


def build(mailboxes: Mailboxes, tokens: Mapping[str, str]) -> FastAPI:
    """The front."""
    app = FastAPI(docs_url=None, redoc_url=None)

    async def caller(authorization: Annotated[str, Header()] = "") -> str:
        name = tokens.get(authorization.removeprefix("Bearer "))
        if name is None:
            raise HTTPException(401)
        return name

    @app.post("/api/hub/messages")
    async def send_message(body: Envelope, sender: str = Depends(caller)) -> dict[str, Any]:
        if body.recipient not in mailboxes:
            raise HTTPException(404)
        message_id = str(uuid.uuid4())
        await mailboxes.put(
            body.recipient,
            {
                "id": message_id,
                "timestamp": time.time(),
                "sender": sender,
                "recipient": body.recipient,
                "type": body.type,
                "payload": body.payload,
            },
        )
        return {"delivered": True, "message_id": message_id}

    @app.get("/api/hub/messages")
    async def drain_messages(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100, name: str = Depends(caller)
    ) -> dict[str, Any]:
        return {"messages": await mailboxes.take(name, limit)}

    return app


async def serve(port: int, nats_port: int, tokens: Mapping[str, str]) -> None:
    """Serve until a signal comes, with the settings that ours gives to uvicorn."""
    connection = await nats.connect(f"nats://{LOOPBACK}:{nats_port}", allow_reconnect=False)
    try:
        mailboxes = Mailboxes(connection)
        await mailboxes.open(sorted(tokens.values()))
        await serve_app(build(mailboxes, tokens), port)
    finally:
        await connection.close()


async def serve_app(app: FastAPI, port: int) -> None:
    """Serve an application on a port of this machine with the gateway's options, until the process ends."""
    config = uvicorn.Config(
        app,
        host=LOOPBACK,
        port=port,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    await uvicorn.Server(config).serve()


def nats_config(port: int, folder: Path) -> str:
    """The configuration of a server of NATS that syncs each message to disk."""
    return _CONFIG.format(port=port, folder=folder / "jetstream")


def nats_server() -> str:
    """The server's program: it lies beside the Python of the checkout, which need not be in PATH."""
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if found is None:
        raise SystemExit("hub: no nats-server; it comes with the group dev (requirements.lock)")
    return found


@contextmanager
def peer(folder: Path, tokens: Mapping[str, str]) -> Iterator[Server]:
    """Run NATS and the front as children of this process; yields the server under measure."""
    port, nats_port = free_port(), free_port()
    folder.mkdir(parents=True)
    config, names = folder / "nats.conf", folder / "tokens.json"
    config.write_text(nats_config(nats_port, folder))
    names.touch(mode=0o600)
    names.write_text(json.dumps({token: name for name, token in tokens.items()}))
    front = [sys.executable, "-P", "-m", "tests.benchmarks.hub_peer", str(port), str(nats_port), str(names)]
    with (
        served("nats", [nats_server(), "-c", config], nats_port, folder) as nats_process,
        served("front", front, port, folder) as front_process,
    ):
        yield Server(port, {"front": front_process.pid, "nats": nats_process.pid})


def main(port: str, nats_port: str, tokens: str) -> None:
    """Run the front until SIGTERM."""
    asyncio.run(serve(int(port), int(nats_port), json.loads(Path(tokens).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
