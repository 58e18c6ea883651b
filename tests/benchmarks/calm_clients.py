"""Principals that behave, for a benchmark of a flood: each measures its own round trips at its own door.

A round trip begins with a message of the principal to itself, and ends when it has the message in hand. A
principal makes one round trip after the other, with a pause, so a slow one delays its next one.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, Self

import httpx

from connectors.doors.file_bridge.queue_folder import queue_root
from schemas.settings.settings import Settings
from tests.agent_signatures import signed_headers
from tests.benchmarks.mcp_load import HEADERS, request
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.mailbox_credentials import mailbox_credentials
from trunkline_agent import Agent, Credentials, HubAccess
from trunkline_agent.mcp.signing import load_private_key, new_key_pair
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.queue import Queue

PAUSE_S: Final = 0.05
WITHIN_S: Final = 20.0

Trip = Callable[[], None]
"""Makes one round trip. Raises if it fails or is not over within WITHIN_S."""


def worker_agent(settings: Settings, operator: httpx.Client, name: str) -> Agent:
    """Add a worker; return its agent."""
    access = HubAccess(settings.gateway_url, add_principal(operator, name, "worker"))
    return Agent(name, Credentials(name, hub=access), patience_s=WITHIN_S)


@contextmanager
def http_trips(settings: Settings, operator: httpx.Client) -> Iterator[Trip]:
    """Send, lease and acknowledge over HTTP."""
    name = "calm_http"
    with worker_agent(settings, operator, name) as agent:

        def trip() -> None:
            sent = agent.send(name, "note", {"text": "next step"})
            message = agent.receive(lease_s=60, wait_s=10)
            if message is None or message.id != sent.message_id:
                raise RuntimeError("leased another message than the one that was sent")
            message.ack()

        yield trip


@contextmanager
def mqtt_trips(settings: Settings, operator: httpx.Client) -> Iterator[Trip]:
    """Publish on the outbox, and wait for receipt and inbox."""
    name = "calm_mqtt"
    told = operator.post(f"/api/hub/agents/{name}/mqtt", json={}).raise_for_status().json()
    credentials = mailbox_credentials(settings, name, told["secret"])
    inbox: queue.SimpleQueue[InboxMessage] = queue.SimpleQueue()
    with MqttAgent(credentials, settings.data_path / name, inbox.put, broker=settings.mqtt) as agent:

        def trip() -> None:
            sent = str(uuid.uuid4())
            agent.send(name, "note", "next step", message_id=sent)
            while inbox.get(timeout=WITHIN_S).message_id != sent:
                pass  # it belongs to a round trip that was too slow

        yield trip


@contextmanager
def mcp_trips(settings: Settings, operator: httpx.Client) -> Iterator[Trip]:
    """Call `send_to_agent`, `lease_messages` and `ack_messages`."""
    name, (private, public) = "calm_mcp", new_key_pair()
    key = load_private_key(private)
    body = {"agent_name": name, "public_key": public, "task": "takes part"}
    operator.post("/api/hub/participants", json=body).raise_for_status()
    with httpx.Client(base_url=settings.mcp_server_url, timeout=WITHIN_S, trust_env=False) as client:

        def call(tool: str, **arguments: Any) -> dict[str, Any]:
            content = request("tools/call", {"name": tool, "arguments": arguments})
            headers = HEADERS | signed_headers(name, key, content)
            answer = client.post("/mcp", content=content, headers=headers).raise_for_status()
            result = answer.json().get("result")
            if result is None or result.get("isError"):
                raise RuntimeError(answer.text[:300])
            return dict(result["structuredContent"])

        def trip() -> None:
            call("send_to_agent", targetAgentId=name, message="next step")
            leased = call("lease_messages", limit=1, timeoutSeconds=10)
            ids = [one["id"] for one in leased["messages"]]
            call("ack_messages", leaseId=leased["leaseId"], messageIds=ids)

        yield trip


@contextmanager
def file_trips(settings: Settings, operator: httpx.Client) -> Iterator[Trip]:
    """Write a line into the file queue, and take the message from the mailbox over HTTP."""
    name, files = "calm_file", Queue(queue_root(settings))
    with worker_agent(settings, operator, name) as agent:

        def trip() -> None:
            sent, deadline = (
                files.send("status", "next step", to=name, sender=name),
                time.monotonic() + WITHIN_S,
            )
            while time.monotonic() < deadline:
                message = agent.receive(lease_s=None, wait_s=10)
                if message is not None and message.id == sent:
                    return
            raise RuntimeError(f"no message within {WITHIN_S:g} s")

        yield trip


CALM: Final = {"http": http_trips, "mqtt": mqtt_trips, "mcp": mcp_trips, "file": file_trips}


class Window:
    """The round trips that began in some turns: their times by principal, and what failed. Thread-safe.

    Attributes:
        health_ms: The times of GET /healthz meanwhile.
    """

    def __init__(self) -> None:
        self.took_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.health_ms: list[float] = []
        self.failures: Counter[str] = Counter()


class CalmClients:
    """All principals of `CALM`, and somebody who asks for /healthz, each on a thread. A context manager.

    Attributes:
        window: Gets the round trips that begin from now on. None: they are not kept.
    """

    def __init__(self, settings: Settings, operator: httpx.Client) -> None:
        self._settings, self._operator = settings, operator
        self._stop = threading.Event()
        self._open = ExitStack()
        self._threads: list[threading.Thread] = []
        self.window: Window | None = None
        self.last_ms: dict[str, float] = {}

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            trips = {
                name: opened.enter_context(make(self._settings, self._operator)) for name, make in CALM.items()
            }
            health = opened.enter_context(
                httpx.Client(base_url=self._settings.gateway_url, timeout=WITHIN_S, trust_env=False)
            )
            self._open = opened.pop_all()
        for name, trip in trips.items():
            thread = threading.Thread(target=self._run, args=(name, trip), name=f"calm-{name}", daemon=True)
            self._threads.append(thread)
        self._threads.append(threading.Thread(target=self._ask_health, args=(health,), daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * WITHIN_S)
        self._open.close()

    def _ask_health(self, client: httpx.Client) -> None:
        while not self._stop.wait(PAUSE_S):
            window, began = self.window, time.monotonic()
            with suppress(httpx.HTTPError):  # it counts with the time that it took
                client.get("/healthz")
            if window is not None:
                window.health_ms.append((time.monotonic() - began) * 1000)

    def _run(self, name: str, trip: Trip) -> None:
        while not self._stop.wait(PAUSE_S):
            window, began = self.window, time.monotonic()
            try:
                trip()
            except Exception as error:
                # It counts with the time that it took.
                if window is not None:
                    window.failures[f"{name}: {type(error).__name__}: {str(error)[:120]}"] += 1
            took_ms = (time.monotonic() - began) * 1000
            self.last_ms[name] = took_ms
            if window is not None:
                window.took_ms[name].append(took_ms)
