"""Answers are bounded in bytes (LM-11), and so is the memory of all that are under way (LM-12)."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import httpx
import psutil
import pytest

from connectors.log.publisher import Publisher
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from schemas.settings.sections import GatewaySettings, LimitSettings
from schemas.streams.control.organism import Listener, OrganismLoaded
from schemas.streams.job.job_registry import broker_digest
from tests.broker_processes import BrokerProcess, wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess, register
from tests.connectors.doors.http_api.hub_stack import MESSAGES, HubStack, hub_settings, write_agent
from trunkline_agent import Agent, AsyncAgent
from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.mcp.signing import new_key_pair

pytestmark = pytest.mark.requirement("LM-11")
_MIB = 1024 * 1024
_ANSWER_BYTES = 64 * 1024
_MEMORY_BYTES = 24 * _MIB
_BODY = "x" * 30_000  # two of them fit into an answer


@pytest.fixture(scope="module")
def hub(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStack]:
    """One gateway whose answers and memory for answers are small."""
    folder = tmp_path_factory.mktemp("bytes")
    settings = hub_settings(kafka_broker, folder)
    changed = settings.gateway.model_copy(
        update={"answer_memory_bytes": _MEMORY_BYTES, "settle_timeout_s": 3.0}
    )
    settings = settings.model_copy(
        update={"gateway": changed, "limits": LimitSettings(answer_bytes=_ANSWER_BYTES)}
    )
    stack = HubStack(settings, folder)
    try:
        stack.start(1)
        yield stack
    finally:
        stack.close()


def _filled(hub: HubStack, count: int, body: str = _BODY) -> tuple[str, str, list[str]]:
    """A principal whose mailbox has messages: its name, its token, and the ids of the messages."""
    name, token = hub.principal("worker")
    ids = []
    for number in range(count):
        said = {"recipient": name, "type": "note", "payload": {"n": number, "text": body}}
        answer = hub.operator.post(MESSAGES, json=said)
        assert answer.status_code == 200, answer.text
        ids.append(answer.json()["message_id"])
    return name, token, ids


def _statuses(hub: HubStack, name: str) -> list[str]:
    """The statuses of all messages of a mailbox, oldest first, over as many pages as it takes."""
    found: list[str] = []
    path, after = f"/api/hub/mailboxes/default/{name}", {}
    while True:
        page = hub.operator.get(path, params={"pending": True, "limit": 1000, **after}).json()
        found += [one["status"] for one in page["messages"]]
        if not page["left"]:
            return found
        after = {"after": page["messages"][-1]["message_id"]}


def test_a_lease_has_the_messages_that_fit_and_leaves_the_rest_unread(hub: HubStack) -> None:
    name, token, ids = _filled(hub, 7)
    client = hub.client(token)
    asked = {"limit": 1000, "lease": 60}

    first = client.get(MESSAGES, params=asked, headers={"X-Request-ID": "lease-1"}).json()

    assert ([one["id"] for one in first["messages"]], first["left"]) == (ids[:2], 5)
    assert _statuses(hub, name) == ["leased"] * 2 + ["unread"] * 5
    assert client.get(MESSAGES, params=asked, headers={"X-Request-ID": "lease-1"}).json() == first
    rest = [client.get(MESSAGES, params=asked).json() for _ in range(4)]
    assert [[one["id"] for one in part["messages"]] for part in rest] == [ids[2:4], ids[4:6], ids[6:], []]
    assert [part["left"] for part in rest] == [3, 1, 0, 0]


def test_a_drain_claims_only_what_it_answers_and_one_message_always_comes(hub: HubStack) -> None:
    _, token, ids = _filled(hub, 3, "x" * 100_000)
    client = hub.client(token)

    found = [client.get(MESSAGES, params={"limit": 1000}).json() for _ in range(4)]

    assert [[one["id"] for one in part["messages"]] for part in found] == [[one] for one in ids] + [[]]
    assert [part["left"] for part in found] == [2, 1, 0, 0]


def test_the_library_goes_on_until_it_has_all(hub: HubStack) -> None:
    for lease_s in (None, 60):
        name, token, ids = _filled(hub, 5)
        with Agent(credentials=Credentials(name, HubAccess(hub.gateways[0].url, token))) as agent:
            taken = []
            for message in agent.messages(limit=1000, lease_s=lease_s, wait_s=0):
                taken.append(message.id)
                if lease_s is not None:
                    message.ack()
        assert taken == ids


def test_the_async_library_goes_on_until_it_has_all(hub: HubStack) -> None:
    name, token, ids = _filled(hub, 5)

    async def taken() -> list[str]:
        async with AsyncAgent(credentials=Credentials(name, HubAccess(hub.gateways[0].url, token))) as agent:
            return [one.id async for one in agent.messages(limit=1000, lease_s=None, wait_s=0)]

    assert asyncio.run(taken()) == ids


def test_lists_with_bodies_are_cut_and_say_how_many_are_left(hub: HubStack) -> None:
    name, token, ids = _filled(hub, 5)
    path = f"/api/hub/mailboxes/default/{name}"

    newest = hub.operator.get(path, params={"limit": 1000}).json()

    assert [one["message_id"] for one in newest["messages"]] == ids[-2:], "the newest, oldest first"
    assert (newest["left"], newest["total"]) == (3, 5)
    assert _statuses(hub, name) == ["unread"] * 5
    client = hub.client(token)
    for _ in range(hub.settings.gateway.max_attempts):
        for _ in range(3):
            part = client.get(MESSAGES, params={"limit": 1000, "lease": 60}).json()
            given = {"lease_id": part["lease_id"], "message_ids": [one["id"] for one in part["messages"]]}
            assert client.post(f"{MESSAGES}/nack", json=given).status_code == 200
    wait_until(lambda: not _statuses(hub, name), what="all are dead")
    dead = hub.operator.get(f"{MESSAGES}/dead", params={"limit": 1000}).json()
    assert len(dead["messages"]) == 2 and dead["left"] == dead["total"] - 2


def _slow_request(gateway: GatewayProcess, token: str, request_id: str) -> socket.socket:
    """A connection that asks for a lease and reads nothing of the answer."""
    address = ("127.0.0.1", gateway.settings.gateway.port)
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(address)
    lines = (
        f"GET {MESSAGES}?limit=1000&lease=600 HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {token}",
        f"X-Request-ID: {request_id}",
    )
    found.sendall("\r\n".join((*lines, "", "")).encode())
    return found


class _PeakRss:
    """The largest resident memory of a process while the context is open."""

    def __init__(self, pid: int) -> None:
        self._process, self._done = psutil.Process(pid), threading.Event()
        self.before = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __enter__(self) -> _PeakRss:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.requirement("LM-12")
def test_many_answers_under_way_have_a_bounded_memory_and_nobody_else_is_shut_out(hub: HubStack) -> None:
    _, token, ids = _filled(hub, 12, "x" * (_MIB - 1000))
    _, other_token, others = _filled(hub, 1, "x" * (_MIB - 1000))
    limits = LimitSettings(answer_bytes=16 * _MIB)
    gateway = GatewayProcess(hub.settings.model_copy(update={"limits": limits}), hub.folder)
    hub.gateways.append(gateway)  # it ends with the others
    gateway.wait_ready()
    slow = []
    with gateway.client(other_token) as other, _PeakRss(gateway.program.process.pid) as memory:
        try:
            # The same messages 60 times: 720 MB, if the gateway had all answers in memory.
            slow = [_slow_request(gateway, token, "the-same") for _ in range(60)]
            wait_until(lambda: _readable(slow), what="the first answer begins")
            began = time.monotonic()
            found = other.get(MESSAGES, params={"lease": 60}).json()
            took_s = time.monotonic() - began
            assert [one["id"] for one in found["messages"]] == others
            assert took_s < 3, "a principal that has taken its share shuts out nobody"
            refused = _status_of_one(slow)
        finally:
            for one in slow:
                one.close()
    assert refused == 503
    assert memory.peak - memory.before < 4 * _MEMORY_BYTES
    with gateway.client(token) as client:
        asked, headers = {"limit": 1000, "lease": 600}, {"X-Request-ID": "the-same"}
        again = client.get(MESSAGES, params=asked, headers=headers).json()
    assert [one["id"] for one in again["messages"]] == ids


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.requirement("LM-12")
def test_a_thousand_leases_of_large_messages_under_way_take_less_than_a_gib(hub: HubStack) -> None:
    usual = GatewaySettings()
    changed = hub.settings.gateway.model_copy(update={"answer_memory_bytes": usual.answer_memory_bytes})
    settings = hub.settings.model_copy(update={"gateway": changed, "limits": LimitSettings()})
    gateway = GatewayProcess(settings, hub.folder)
    hub.gateways.append(gateway)
    gateway.wait_ready()
    tokens = [_filled(hub, 7, "x" * (_MIB - 1000))[1] for _ in range(10)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    slow = []
    with _PeakRss(gateway.program.process.pid) as memory:
        try:
            slow = [_slow_request(gateway, token, "the-same") for token in tokens for _ in range(100)]
            wait_until(
                lambda: len(_readable(slow)) == len(slow), timeout_s=200, what="all are answered or refused"
            )
        finally:
            for one in slow:
                one.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(f"{memory.before / _MIB:.0f} MiB before, {memory.peak / _MIB:.0f} MiB at most")
    assert memory.peak - memory.before < 1024 * _MIB


def _readable(connections: list[socket.socket]) -> list[tuple[int, int]]:
    """Return the connections on which an answer has begun, or which have ended."""
    poll = select.poll()
    for one in connections:
        poll.register(one, select.POLLIN)
    return poll.poll(0)


def _status_of_one(connections: list[socket.socket]) -> int:
    """The status of the last of these connections that is answered with something else than 200."""
    for one in reversed(connections):
        one.settimeout(10)
        head = one.recv(4096).split(b"\r\n\r\n")[0]
        status = int(head.split(b" ")[1])
        if status != httpx.codes.OK:
            assert b"retry-after: 1" in head.lower()
            return status
    raise AssertionError("all were answered at once")


def test_the_answer_of_a_lease_is_json_whatever_the_bodies_are(hub: HubStack) -> None:
    name, token = hub.principal("worker")
    payloads: list[Any] = [1, "text", None, [{"a": [1.5, True]}], {"\u2603": "\u0001"}]
    for payload in payloads:
        hub.operator.post(MESSAGES, json={"recipient": name, "type": "note", "payload": payload})

    found = hub.client(token).get(MESSAGES, params={"limit": 1000})

    assert [one["payload"] for one in json.loads(found.content)["messages"]] == payloads


@pytest.mark.requirement("LM-14")
def test_lists_without_bodies_are_cut_alike(hub: HubStack) -> None:
    text = "x" * 30_000
    tasks = [hub.submit("idle", f"{number} {text}").id for number in range(3)]
    for number in range(3):
        joined = {"agent_name": f"long-{number}", "public_key": new_key_pair()[1], "task": text}
        assert hub.operator.post("/api/hub/participants", json=joined).status_code == 201
        body = {"recipient": "operator", "type": "note", "payload": text, "cron": "0 0 1 1 *"}
        answer = hub.operator.post(f"/api/hub/schedules/long-{number}", json=body)
        assert answer.status_code == 200, answer.text

    def found(path: str) -> tuple[list[Any], int]:
        answer = hub.operator.get(f"/api/hub/{path}", params={"limit": 1000} if path != "participants" else {})
        assert len(answer.content) <= _ANSWER_BYTES + 100
        return answer.json()[path], answer.json()["left"]

    newest, left = found("tasks")
    assert ([one["id"] for one in newest], left) == (tasks[:0:-1], 1)
    first, left = found("schedules")
    assert ([one["schedule"] for one in first], left) == (["long-0", "long-1"], 1)
    jobs = [register(hub.operator, description="\U0001f680" * 4000)["job_id"] for _ in range(6)]
    newest, left = found("jobs")
    assert [one["job_id"] for one in newest] == jobs[: -len(newest) - 1 : -1] and left >= 6 - len(newest) > 0
    listed, left = found("participants")
    assert len(listed) == 2 and left >= 1
    token = hub.principal("worker")[1]
    with Agent(credentials=Credentials("", HubAccess(hub.gateways[0].url, token))) as agent:
        assert {f"long-{number}" for number in range(3)} <= {one.name for one in agent.discover()}
        names = [f"own-{number}" for number in range(5)]
        for name in names:
            agent.schedule(name, "operator", "note", text, cron="0 0 1 1 *")
        assert [one.name for one in agent.schedules()] == names


def _place(row: dict[str, Any]) -> str:
    return f"{row['scope']}/{row['name']}"


# Of each list the field of its answer, the name of a row, and the least number of rows.
LISTS: dict[str, tuple[str, Callable[[Any], str], int]] = {
    "principals": ("principals", itemgetter("principal"), 330),
    "mqtt-agents": ("agents", itemgetter("agent_name"), 330),
    "limits": ("limits", _place, 330),
    "brokers": ("brokers", broker_digest, 30),
    "agents": ("agents", itemgetter("name"), 80),
    "participants": ("participants", itemgetter("id"), 80),
    "listeners": ("listeners", itemgetter("listener"), 80),
}


@pytest.fixture(scope="module")
def long_lists(hub: HubStack) -> HubStack:
    """The gateway with more rows of each list than an answer has room for."""

    def post(path: str, body: dict[str, Any]) -> None:
        answer = hub.operator.post(f"/api/hub/{path}", json=body)
        assert answer.is_success, answer.text

    def add(name: str) -> None:
        post("principals", {"principal": name, "role": "worker"})
        post(f"agents/{name}/mqtt", {})
        post(f"limits/name/{name}", {"messages_per_minute": 7})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, [f"many-{number:03}-{'x' * 90}" for number in range(330)]))
    for number in range(30):
        file = f"/{'x' * 1000}"
        broker = {"host": f"broker-{number}", "ca_certs": file, "certfile": file, "keyfile": file}
        register(hub.operator, broker=broker)
    names, text = [f"row-{number:02}" for number in range(80)], "y" * 1000
    for name in names:
        write_agent(hub.settings.gateway.agents_dir, name, image="test/idle", description=text)
        post("participants", {"agent_name": f"part-{name}", "public_key": new_key_pair()[1], "task": text})
    listeners = [Listener(name=f"hears-{name}", root_tag="search", example=text) for name in names]
    loaded = OrganismLoaded(request_id="long-rows", digest="0" * 64, listeners=listeners)
    with Publisher(hub.settings) as publisher:
        publisher.append(loaded.record(door="stack", principal="operator")).result(20)
    wait_until(lambda: _are_known(hub), 30, "the agents and the listeners")
    return hub


def _are_known(hub: HubStack) -> bool:
    agent, listeners = (hub.operator.get(f"/api/hub/{path}") for path in ("agents/row-79", "listeners"))
    found = listeners.json()
    return agent.is_success and len(found["listeners"]) + found["left"] == 80


@pytest.mark.requirement("LM-14")
@pytest.mark.requirement("LM-25")
@pytest.mark.parametrize("path", LISTS)
def test_lists_by_name_come_in_parts_and_the_client_goes_on_until_it_has_all(
    long_lists: HubStack, path: str
) -> None:
    key, name_of, least = LISTS[path]
    url = f"/api/hub/{path}"
    first = long_lists.operator.get(url)
    assert len(first.content) <= 2 * _ANSWER_BYTES  # a broker is a text, which JSON escapes
    shown = [name_of(row) for row in first.json()[key]]
    assert first.json()["left"] > 0
    second = long_lists.operator.get(url, params={"after": shown[-1]}).json()
    assert not {name_of(row) for row in second[key]} & set(shown)
    with GatewayClient(long_lists.gateways[0].settings) as client:
        found = client.get_all(url, key, name_of)
    listed = [name_of(row) for row in found[key]]
    assert len(set(listed)) == len(listed) >= least
    assert len(listed) == len(shown) + first.json()["left"]
    assert listed == sorted(listed, key=lambda one: (one.startswith("name/"), one))
