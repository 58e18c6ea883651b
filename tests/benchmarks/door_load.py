"""Messages at each door at a steady rate, for a benchmark that asks what a further door costs."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from connectors.doors.file_bridge.queue_folder import queue_root
from schemas.settings.settings import Settings
from tests.agent_signatures import signed_headers
from tests.benchmarks.bench_stack import operator_client
from tests.benchmarks.mcp_load import HEADERS, request
from tests.mailbox_credentials import mailbox_credentials
from trunkline_agent.mcp.signing import load_private_key, new_key_pair
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.queue import Queue

TEXT: Final = "step 7 of 12 done, reading the index"
READER: Final = "door_reader"
_TIMEOUT_S: Final = 20.0
_numbers = itertools.count(1)

Send = Callable[[], None]


@contextmanager
def http(settings: Settings) -> Iterator[Send]:
    """By `POST /api/hub/messages`."""
    with operator_client(settings) as hub:

        def send() -> None:
            body = {"recipient": READER, "type": "note", "payload": {"text": TEXT, "n": next(_numbers)}}
            hub.post("/api/hub/messages", json=body).raise_for_status()

        yield send


@contextmanager
def file(settings: Settings) -> Iterator[Send]:
    """As lines of the file queue."""
    queue = Queue(queue_root(settings))
    yield lambda: _ignore(queue.send("status", TEXT, to=READER, sender="door_filer"))


@contextmanager
def mqtt(settings: Settings) -> Iterator[Send]:
    """On an agent's outbox; each waits for its receipt."""
    # A name has one account and one key, and each row of a benchmark a sender of its own.
    name = f"door_mqtt_{next(_numbers)}"
    with operator_client(settings) as hub:
        told = hub.post(f"/api/hub/agents/{name}/mqtt", json={}).raise_for_status().json()
    credentials = mailbox_credentials(settings, name, told["secret"])
    state = settings.data_path / f"agent-{uuid.uuid4().hex}"
    with MqttAgent(credentials, Path(state), _unread, broker=settings.mqtt) as agent:
        yield lambda: _ignore(agent.send(READER, "hint", TEXT, message_id=str(uuid.uuid4())))


@contextmanager
def mcp(settings: Settings) -> Iterator[Send]:
    """By signed calls of `send_to_agent`."""
    name, (private, public) = f"door_mcp_{next(_numbers)}", new_key_pair()
    key = load_private_key(private)
    with operator_client(settings) as hub:
        body = {"agent_name": name, "public_key": public, "task": "takes part"}
        hub.post("/api/hub/participants", json=body).raise_for_status()
    with httpx.Client(base_url=settings.mcp_server_url, timeout=_TIMEOUT_S, trust_env=False) as client:

        def send() -> None:
            said = {"targetAgentId": READER, "message": TEXT}
            call = request("tools/call", {"name": "send_to_agent", "arguments": said})
            headers = HEADERS | signed_headers(name, key, call)
            answer = client.post("/mcp", content=call, headers=headers).raise_for_status()
            result = answer.json().get("result")
            if result is None or result.get("isError"):
                raise RuntimeError(answer.text[:300])

        yield send


@contextmanager
def xml(settings: Settings) -> Iterator[Send]:
    """As XML for the sample calculator, which answers each."""
    head = {"Content-Type": "application/xml"}
    with operator_client(settings) as hub:

        def send() -> None:
            body = (
                '<message xmlns="urn:trunkline:envelope:1"><to>calculator</to>'
                '<calculate xmlns="urn:trunkline:sample:1"><operation>add</operation>'
                f"<first>{next(_numbers)}</first><second>2</second></calculate></message>"
            )
            hub.post("/messages", content=body, headers=head).raise_for_status()

        yield send


DOORS: Final = {"http": http, "file": file, "mqtt": mqtt, "mcp": mcp, "xml": xml}


class DoorLoads:
    """Sends at these doors at once, at `rate` a second each. A context manager; `failure` is the first one."""

    def __init__(self, settings: Settings, names: list[str], rate: float) -> None:
        self._settings, self._names, self._rate = settings, names, rate
        self._stop = threading.Event()
        self._open = ExitStack()
        self._threads: list[threading.Thread] = []
        self.sent = dict.fromkeys(names, 0)
        self.failure: Exception | None = None

    def __enter__(self) -> DoorLoads:
        if self._names:
            with operator_client(self._settings) as hub:
                added = hub.post("/api/hub/principals", json={"principal": READER, "role": "worker"})
                # It is there already in the second row.
                if added.status_code not in (201, 409):
                    added.raise_for_status()
        with ExitStack() as opened:
            sends = [(name, opened.enter_context(DOORS[name](self._settings))) for name in self._names]
            self._open = opened.pop_all()
        for name, send in sends:
            thread = threading.Thread(target=self._run, args=(name, send), name=f"door-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
        self._open.close()

    def _run(self, name: str, send: Send) -> None:
        began = time.monotonic()
        while not self._stop.wait(max(0.0, began + self.sent[name] / self._rate - time.monotonic())):
            try:
                send()
            except Exception as error:  # told by whoever waits for the load
                self.failure = self.failure or RuntimeError(f"{name}: {error}")
                return
            self.sent[name] += 1


def _ignore(_: Any) -> None:
    """Discard the value that a send returns."""


def _unread(_: InboxMessage) -> None:
    """Nobody writes to the sender."""
