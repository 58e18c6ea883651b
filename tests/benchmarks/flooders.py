"""One principal that floods by a door, as a process of its own, and a process that only uses the processor.

A flooder sends at the full speed of one process and ignores what it is told, such as to try again later. Over
HTTP it keeps `CONNECTIONS` connections and has one request under way on each. Over MQTT it has `IN_FLIGHT`
messages without a PUBACK. In the file queue it writes one line after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import orjson
from pydantic import SecretStr

from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.programs.local_stack.child_process import set_niceness
from schemas.settings.settings import Settings
from tests.benchmarks.lean_http import Broken, open_connection, request_bytes
from tests.benchmarks.mcp_load import signed_call
from trunkline_agent.broker import BrokerAccess, job_broker
from trunkline_agent.mcp.signing import load_private_key
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.queue import Queue
from trunkline_agent.wire.agent_message import mqtt_user, sign_said
from trunkline_agent.wire.job_event import PROGRESS, STARTED
from trunkline_agent.wire.mqtt_password import mqtt_password
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import events_topic, outbox_topic

CONNECTIONS: Final = 32
IN_FLIGHT: Final = 1000
ANSWER_S: Final = 30.0
START_S: Final = 60.0
_TEXT: Final = "step 7 of 12 done, reading the index"
_SLICE_S: Final = 0.005
BURN: Final = "burn"


@dataclass(frozen=True)
class Order:
    """A flood: its door, the principal with its secrets (token, secret or private key), and the recipient.

    `name` is the name of the principal, or the id of its job. `prefix` is the prefix of an MQTT agent's topics.
    """

    door: str
    settings: Settings
    name: str
    secret: str = field(default="", repr=False)
    sink: str = ""
    prefix: str = ""


@dataclass(frozen=True)
class Flooded:
    """A turn of a flood: answers by status or reason, the seconds it took, and the processor time it used."""

    answers: dict[str, int]
    seconds: float
    cpu_s: float

    @property
    def sent(self) -> int:
        """The number of messages that were sent and answered."""
        return sum(self.answers.values())


Turn = Callable[[float], Counter[str]]
"""Floods for so many seconds."""


def http_turns(order: Order) -> Turn:
    """`POST /api/hub/messages`."""
    body = orjson.dumps({"recipient": order.sink, "type": "note", "payload": {"text": _TEXT}})
    headers = {"Authorization": f"Bearer {order.secret}", "Content-Type": "application/json"}
    asked = request_bytes("POST", "/api/hub/messages", headers, body)
    return lambda seconds: asyncio.run(_ask(order.settings.gateway.port, lambda: asked, seconds))


def xml_turns(order: Order) -> Turn:
    """`POST /messages`, for the sample calculator."""
    body = (
        b'<message xmlns="urn:trunkline:envelope:1"><to>calculator</to>'
        b'<calculate xmlns="urn:trunkline:sample:1"><operation>add</operation>'
        b"<first>1</first><second>2</second></calculate></message>"
    )
    headers = {"Authorization": f"Bearer {order.secret}", "Content-Type": "application/xml"}
    asked = request_bytes("POST", "/messages", headers, body)
    return lambda seconds: asyncio.run(_ask(order.settings.gateway.port, lambda: asked, seconds))


def mcp_turns(order: Order) -> Turn:
    """Signed calls of `send_to_agent`."""
    key, said = load_private_key(order.secret.encode()), {"targetAgentId": order.sink, "message": _TEXT}

    def asked() -> bytes:
        return signed_call(order.name, key, "send_to_agent", said)

    return lambda seconds: asyncio.run(_ask(order.settings.agent_mcp.port, asked, seconds))


async def _ask(port: int, asked: Callable[[], bytes], seconds: float) -> Counter[str]:
    """Send requests on all connections, each again and again. A closed connection is opened again."""
    answers: Counter[str] = Counter()
    deadline = time.monotonic() + seconds

    async def one_connection() -> None:
        while time.monotonic() < deadline:
            try:
                connection = await open_connection(port)
                try:
                    while time.monotonic() < deadline:
                        status, body = await connection.ask(asked(), ANSWER_S)
                        answers[_answer_of(status, body)] += 1
                finally:
                    connection.close()
            except Broken:
                answers["broken"] += 1
                await asyncio.sleep(0.01)

    await asyncio.gather(*(one_connection() for _ in range(CONNECTIONS)))
    return answers


def _answer_of(status: int, body: bytes) -> str:
    """Return the status, with a mark for an MCP tool that has refused."""
    return f"{status} refused" if status == 200 and b'"isError":true' in body else str(status)


def mqtt_turns(order: Order) -> Turn:
    """Signed messages on an agent's outbox."""
    user = mqtt_user(order.name)
    own = {"username": user, "password": SecretStr(mqtt_password(order.secret, user))}
    numbers = itertools.count(1)

    def payload() -> bytes:
        said = {"schema_version": 1, "message_id": str(uuid.uuid4()), "to": order.sink, "kind": "note"}
        return canonical(sign_said({**said, "body": _TEXT, "seq": next(numbers)}, order.secret))

    topic = outbox_topic(order.prefix, order.name)
    return _published(order.settings.mqtt.model_copy(update=own), topic, payload)


def jobs_turns(order: Order) -> Turn:
    """Signed events of one job."""
    numbers = itertools.count(1)

    def payload() -> bytes:
        seq = next(numbers)
        event = {
            "schema_version": 1,
            "seq": seq,
            "job_id": order.name,
            "event": STARTED if seq == 1 else PROGRESS,
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "detail": _TEXT,
            "data": {"step": seq},
        }
        return canonical(sign_event(event, order.secret))

    mqtt = job_broker(order.settings.mqtt, order.name, order.secret)
    return _published(mqtt, events_topic(order.settings.mqtt.topic_prefix, order.name), payload)


def _published(mqtt: BrokerAccess, topic: str, payload: Callable[[], bytes]) -> Turn:
    def turn(seconds: float) -> Counter[str]:
        answers: Counter[str] = Counter()
        room, lock = threading.Semaphore(IN_FLIGHT), threading.Lock()

        def answered(answer: Any) -> None:
            word = "lost" if answer.exception() is not None else str(answer.result())
            with lock:
                answers[word] += 1
            room.release()

        connection = MqttConnection(mqtt)
        connection.open()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not connection.lost.is_set():
            if room.acquire(timeout=0.1):
                connection.publish(topic, payload()).add_done_callback(answered)
        ended = time.monotonic() + ANSWER_S
        for _ in range(IN_FLIGHT):  # all have their PUBACK
            room.acquire(timeout=max(0.0, ended - time.monotonic()))
        connection.close()
        return answers

    return turn


def file_turns(order: Order) -> Turn:
    """Lines of the file queue."""
    files = Queue(queue_root(order.settings))

    def turn(seconds: float) -> Counter[str]:
        answers: Counter[str] = Counter()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            files.send("status", _TEXT, to=order.sink, sender=order.name)
            answers["written"] += 1
        return answers

    return turn


def burn_turns(order: Order) -> Turn:
    """Use the processor and send nothing. `order.secret` is the share of one core, such as `0.8`."""

    def turn(seconds: float) -> Counter[str]:
        burn(float(order.secret), seconds)
        return Counter()

    return turn


def burn(share: float, seconds: float) -> None:
    """Use a share of one core (0 to 1) for so many seconds, in slices of 5 ms, and sleep otherwise."""
    began, used = time.monotonic(), time.process_time()
    while (passed := time.monotonic() - began) < seconds:
        if time.process_time() - used < share * passed:
            until = time.process_time() + _SLICE_S
            while time.process_time() < until:
                pass
        else:
            time.sleep(_SLICE_S)


TURNS: Final[dict[str, Callable[[Order], Turn]]] = {
    "http": http_turns,
    "mqtt": mqtt_turns,
    "mcp": mcp_turns,
    "file": file_turns,
    "xml": xml_turns,
    "jobs": jobs_turns,
    BURN: burn_turns,
}


class Flooder:
    """A process that floods when it is told to. `flooding` starts and ends it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def begin(self, seconds: float) -> None:
        """Begin a turn."""
        self._pipe.send(seconds)

    def result(self, within_s: float) -> Flooded:
        """Wait for the end of the turn. Raises RuntimeError if it failed or takes longer than `within_s`."""
        if not self._pipe.poll(within_s):
            raise RuntimeError("the flood does not end")
        try:
            found = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the flooder has ended") from None
        if not isinstance(found, Flooded):
            raise RuntimeError(f"the flood has failed: {found}")
        return found


def _serve(order: Order, niceness: int, pipe: Pipe) -> None:
    # Linux shares the processor among sessions first, then among the processes of each (sched(7), autogroup).
    # Each part of the local stack leads a session of its own. In the session of the clients that measure,
    # flooder and control would take their processor time from these, and not from the stack.
    os.setsid()
    set_niceness(os.getpid(), niceness)
    try:
        turn = TURNS[order.door](order)
        pipe.send("ready")
        while (seconds := pipe.recv()) is not None:
            began, used = time.monotonic(), time.process_time()
            answers = turn(seconds)
            pipe.send(Flooded(dict(answers), time.monotonic() - began, time.process_time() - used))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def flooding(order: Order, niceness: int = 0) -> Iterator[Flooder]:
    """Start the process of a flood, which waits for its turns, and end it with the block.

    Signals of the terminal do not reach the process, because it leads a session of its own. If the block ends
    by an exception such as KeyboardInterrupt or SystemExit, the process is killed in the middle of its turn. If
    the caller's process is killed, the flooder ends after its turn.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(order, niceness, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(START_S) else "it does not start"
        if found != "ready":
            raise RuntimeError(f"the flooder of {order.door} cannot flood: {found}")
        yield Flooder(ours)
        with suppress(OSError):
            ours.send(None)
        process.join(5)
    finally:
        process.kill()
        process.join()
        ours.close()
