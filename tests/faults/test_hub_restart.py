"""kill -9 of everything: tokens work again, tasks run on or are failed, and each pending message is there."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from deltalake import DeltaTable

from connectors.hub.launcher.local_processes import stop_all
from connectors.plumbing.machine import state_file
from connectors.programs.local_stack import child_process, free_port
from connectors.programs.local_stack.part import child_environment
from schemas.settings.settings import PROJECT_ROOT, GatewaySettings, KafkaSettings, Settings
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from tests.broker_processes import STOP_S, wait_until
from tests.connectors.doors.http_api import hub_stack
from tests.connectors.doors.http_api.hub_access import PRINCIPALS, GatewayProcess
from tests.connectors.doors.http_api.hub_stack import TASKS
from tests.faults.test_agreement import end_offsets, views_are_at

UP_WITHIN_S = 120.0
PATIENCE_S = 60.0
READER, AGENT = "reader", "idle"
_drains = itertools.count()
_IDLE = {"test/idle": {"command": ["{python}", "-S", "-c", "import time; time.sleep(600)"]}}


def own_settings(tmp_path: Path) -> Settings:
    """A backbone of its own with one agent, which does nothing until it is ended."""
    agents, launchers = tmp_path / "agents.d", tmp_path / "launchers.yaml"
    agents.mkdir()
    hub_stack.write_agent(agents, AGENT, image="test/idle", capabilities=["wait"])
    launchers.write_text(yaml.safe_dump(_IDLE))
    return Settings(
        data_dir=tmp_path / "stack",
        kafka=KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}", delivery_timeout_s=10),
        gateway=GatewaySettings(
            port=free_port(), task_check_s=0.5, stop_grace_s=2, agents_dir=agents, launchers_file=launchers
        ),
    )


class Backbone:
    """A supervised stack and a second gateway beside it, all of which end by one kill."""

    def __init__(self, settings: Settings, folder: Path, parts: Iterable[str]) -> None:
        self.settings = settings
        self._folder = folder
        self._parts = parts
        self._mark = child_process.mark_of(settings.data_path, "")
        self._open = ExitStack()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._gateways: list[GatewayProcess] = []
        self.urls: list[str] = []

    def start(self) -> None:
        """Start all and wait until it serves and knows the agent."""
        state_file.remove_state(self.settings)
        # It ends with this process, however that ends, and its parts end with it.
        self._supervisor = child_process.start_child(
            [sys.executable, "-m", "connectors.programs.local_stack.supervisor", *self._parts],
            cwd=PROJECT_ROOT,
            environment=child_environment(self.settings),
            mark=child_process.mark_of(self._folder, "supervisor"),
            log=self._folder / "supervisor.log",
        )
        # The streaming jobs need longer, and nobody waits for them but who reads the tables.
        wait_until(self._serves, UP_WITHIN_S, "the gateway serves")
        self.urls = [self.settings.gateway_url]
        self.add_gateway()
        for gateway in range(2):
            operator = self.client(gateway=gateway)
            wait_until(
                lambda operator=operator: (
                    AGENT in {one["name"] for one in operator.get(hub_stack.AGENTS).json()["agents"]}
                ),
                PATIENCE_S,
                "the agent is known",
            )

    def _serves(self) -> bool:
        assert self._supervisor is not None and self._supervisor.poll() is None, "the supervisor has ended"
        state = state_file.read_state(self.settings)
        return state is not None and state["parts"]["gateway"]["state"] == "ready"

    def add_gateway(self) -> int:
        """One more gateway beside the stack; its number."""
        gateway = GatewayProcess(self.settings, self._folder)
        self._gateways.append(gateway)
        gateway.program.wait_ready(UP_WITHIN_S)
        self.urls.append(gateway.url)
        return len(self.urls) - 1

    def client(self, token: str | None = None, gateway: int = 0) -> httpx.Client:
        """A client that is closed in the end; None: the operator's token."""
        found = token or self.settings.operator_token_file.read_text().strip()
        headers = {"Authorization": f"Bearer {found}"}
        client = httpx.Client(base_url=self.urls[gateway], headers=headers, timeout=20, trust_env=False)
        return self._open.enter_context(client)

    def hold(self, part: str) -> None:
        """Let a part do nothing more."""
        for process in child_process.marked_processes(child_process.mark_of(self.settings.data_path, part)):
            process.suspend()

    def kill(self, others: Iterable[int] = ()) -> None:
        """kill -9 of supervisor, parts, gateways and these other processes, all at one moment."""
        own = [gateway.program.process for gateway in self._gateways]
        own += [] if self._supervisor is None else [self._supervisor]
        victims = child_process.marked_processes(self._mark)
        for pid in (*(process.pid for process in own), *(one.pid for one in victims), *others):
            # Processes that the supervisor has started end with it.
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGKILL)
        for process in own:
            process.wait(STOP_S)
        self._gateways.clear()
        child_process.kill_marked(self._mark)

    def close(self) -> None:
        """Nothing of it is left, and no agent."""
        self._open.close()
        self.kill()
        stop_all(self.settings, 0.0)
        assert hub_stack.processes_with(str(self._folder)) == []


@dataclass
class Answered:
    """The answers before the kill. `posted`: the ids by mailbox; `drained`: who, under which id, what."""

    tokens: dict[str, str] = field(default_factory=dict)
    posted: dict[str, list[str]] = field(default_factory=lambda: {READER: [], AGENT: []})
    drained: list[tuple[str, str, list[dict[str, Any]]]] = field(default_factory=list)

    def pending(self, mailbox: str) -> list[str]:
        """The ids of the messages that were not handed out."""
        handed = {message["id"] for name, _, found in self.drained if name == mailbox for message in found}
        return [message_id for message_id in self.posted[mailbox] if message_id not in handed]


def post(client: httpx.Client, mailbox: str, key: str) -> str:
    """Send a message under this key; its id."""
    envelope = {"recipient": mailbox, "type": "note", "payload": {"key": key}}
    answer = client.post(hub_stack.MESSAGES, json=envelope, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["delivered"]) == (200, True), answer.text
    return str(answer.json()["message_id"])


def drain(client: httpx.Client, request_id: str, limit: int = 3) -> list[dict[str, Any]]:
    """Drain the mailbox once and return the messages."""
    answer = client.get(hub_stack.MESSAGES, params={"limit": limit}, headers={"X-Request-ID": request_id})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["messages"])


class Burst(threading.Thread):
    """Sends until the kill cuts it off. `posted`: the id by key of what was answered; `cut`: the next key."""

    def __init__(self, clients: list[httpx.Client]) -> None:
        super().__init__(daemon=True)
        self._clients = clients
        self.posted: dict[str, str] = {}
        self.cut = ""

    def run(self) -> None:
        """Send, at the gateways in turn."""
        while True:
            number = len(self.posted)
            self.cut = f"burst-{number}"
            try:
                self.posted[self.cut] = post(self._clients[number % 2], READER, self.cut)
            except httpx.TransportError:
                return


def submitted(operator: httpx.Client, answered: Answered, name: str) -> str:
    """Give the agent a task, whose token is kept under this name; the task's id."""
    answer = operator.post(TASKS, json={"agent_name": AGENT, "description": name})
    assert answer.status_code == 201, answer.text
    answered.tokens[name] = answer.json()["token"]
    return str(answer.json()["task"]["id"])


def with_tokens_and_tasks(backbone: Backbone) -> tuple[Answered, dict[str, str]]:
    """A reader, somebody revoked, two tasks that run and one that has ended; the tasks' ids by name."""
    answered, operator = Answered(), backbone.client()
    for name in (READER, "revoked"):
        added = operator.post(PRINCIPALS, json={"principal": name, "role": "worker"})
        assert added.status_code == 201, added.text
        answered.tokens[name] = added.json()["token"]
    assert operator.post(f"{PRINCIPALS}/revoked/revoke", json={}).status_code == 200
    tasks = {name: submitted(operator, answered, name) for name in ("survivor", "doomed", "ended")}
    assert operator.post(f"{TASKS}/{tasks['ended']}/cancel", json={}).status_code == 200
    wait_until(
        lambda: state_of_container(operator, tasks["ended"]) == "recycled", PATIENCE_S, "the ended is recycled"
    )
    # The agent's mailbox is that of both its tasks.
    answered.tokens[AGENT] = answered.tokens["survivor"]
    return answered, tasks


def with_messages(backbone: Backbone, answered: Answered, when: str) -> None:
    """Eight messages for each mailbox, sent at both gateways, and one drain of each."""
    senders = [backbone.client(gateway=number) for number in range(2)]
    for mailbox in (READER, AGENT):
        for number in range(8):
            key = f"{when}-{mailbox}-{number}"
            answered.posted[mailbox].append(post(senders[number % 2], mailbox, key))
        found = drain(backbone.client(answered.tokens[mailbox]), when)
        assert len(found) == 3
        answered.drained.append((mailbox, when, found))


def wait_settled(settings: Settings) -> None:
    """Wait until the view tables hold all that is in the log now."""
    ends = end_offsets(settings)
    wait_until(lambda: views_are_at(settings, ends), UP_WITHIN_S, "the tables are at the log's end")


def state_of_container(operator: httpx.Client, task_id: str) -> str | None:
    """The state of what was launched for a task."""
    containers = operator.get(hub_stack.CONTAINERS, params={"limit": 1000}).json()["containers"]
    return next((str(one["state"]) for one in containers if one["task_id"] == task_id), None)


def messages_in_tables(settings: Settings) -> set[str]:
    """The ids of the messages that the view tables know."""
    table = DeltaTable(settings.table_path(MAILBOX_VIEW)).to_pyarrow_table(columns=["message_id"])
    return set(table["message_id"].to_pylist())


def kill_in_a_burst(backbone: Backbone, answered: Answered, doomed: str) -> Burst:
    """kill -9 of everything and of one agent, while messages come in; what was answered last is noted."""
    burst = Burst([backbone.client(gateway=number) for number in range(2)])
    burst.start()
    wait_until(lambda: len(burst.posted) >= 10, PATIENCE_S, "ten messages of the burst")
    backbone.kill(hub_stack.processes_of(doomed))
    burst.join(STOP_S)
    assert not burst.is_alive()
    assert hub_stack.processes_of(doomed) == []
    answered.posted[READER] += burst.posted.values()
    return burst


def assert_tokens_and_tasks_are_there(backbone: Backbone, answered: Answered, tasks: dict[str, str]) -> None:
    """Tokens work or are refused as before; the task whose process is gone fails, the other one runs on."""
    operator = backbone.client()

    def shown(name: str) -> dict[str, Any]:
        return dict(operator.get(f"{TASKS}/{tasks[name]}").json())

    wait_until(lambda: shown("doomed")["status"] == "failed", PATIENCE_S, "the check has failed the doomed")
    assert "process ended" in shown("doomed")["error"]
    assert shown("survivor")["status"] == "running"
    assert shown("ended")["status"] == "cancelled"
    for number in range(len(backbone.urls)):
        own = backbone.client(answered.tokens["survivor"], number).get(f"{TASKS}/{tasks['survivor']}")
        assert (own.status_code, own.json()["status"]) == (200, "running")
        for name in ("revoked", "doomed", "ended"):
            asks = backbone.client(answered.tokens[name], number)
            wait_until(
                lambda asks=asks: asks.get(hub_stack.MESSAGES).status_code == 401,
                PATIENCE_S,
                f"{name} is refused",
            )


def assert_drains_are_the_same(backbone: Backbone, answered: Answered) -> None:
    """Assert that each gateway repeats the drains that were answered before the kill."""
    for number in range(len(backbone.urls)):
        for mailbox, request_id, found in answered.drained:
            assert drain(backbone.client(answered.tokens[mailbox], number), request_id) == found


def drained_at(backbone: Backbone, token: str, gateways: Iterable[int], most: int) -> list[str]:
    """The ids that drains get at these gateways at once, each until nothing is left, or so many drains."""

    def drains(number: int) -> list[str]:
        client, found = backbone.client(token, number), []
        for _ in range(most):
            messages = drain(client, f"after-{next(_drains)}")
            if not messages:
                break
            found += [message["id"] for message in messages]
        return found

    with ThreadPoolExecutor(4) as pool:
        return [message_id for ids in pool.map(drains, gateways) for message_id in ids]


def assert_the_survivor_can_complete(backbone: Backbone, answered: Answered, task_id: str) -> None:
    """The task is completed with the token from before the kill, and its agent is stopped."""
    operator, own = backbone.client(), backbone.client(answered.tokens["survivor"])
    assert len(hub_stack.processes_of(task_id)) == 1
    done = own.post(f"{TASKS}/{task_id}/complete", json={"result": "42"})
    assert (done.status_code, done.json()["status"], done.json()["result"]) == (200, "completed", "42")
    wait_until(lambda: state_of_container(operator, task_id) == "recycled", PATIENCE_S, "the agent is stopped")
    assert hub_stack.processes_of(task_id) == []
    assert own.get(hub_stack.MESSAGES).status_code == 401


@pytest.mark.requirement("HH-10")
@pytest.mark.requirement("HH-02")
@pytest.mark.requirement("HH-05")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "parts",
    [
        # With fewer of everything: test_after_kill_9_tokens_tasks_and_messages_are_there_again.
        pytest.param(("kafka", "gateway"), id="log", marks=pytest.mark.slow),
        pytest.param(("kafka", "gateway", "streams"), id="tables", marks=pytest.mark.slow),
    ],
)
def test_after_a_kill_of_everything_tokens_tasks_and_pending_messages_are_there(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    settings = own_settings(tmp_path)
    backbone, has_tables = Backbone(settings, tmp_path, parts), "streams" in parts
    try:
        backbone.start()
        answered, tasks = with_tokens_and_tasks(backbone)
        with_messages(backbone, answered, "settled")
        if has_tables:
            wait_settled(settings)
            backbone.hold("streams")
        with_messages(backbone, answered, "answered")
        survivor = hub_stack.processes_of(tasks["survivor"])
        burst = kill_in_a_burst(backbone, answered, tasks["doomed"])
        if has_tables:
            known = messages_in_tables(settings)
            assert {*answered.posted[READER][:8], *answered.posted[AGENT][:8]} == known
        backbone.start()
        assert hub_stack.processes_of(tasks["survivor"]) == survivor
        answered.posted[READER].append(post(backbone.client(), READER, burst.cut))
        for key, message_id in burst.posted.items():
            assert post(backbone.client(gateway=1), READER, key) == message_id
        assert_tokens_and_tasks_are_there(backbone, answered, tasks)
        assert_drains_are_the_same(backbone, answered)
        got = {name: drained_at(backbone, answered.tokens[name], (0, 1), 1) for name in (READER, AGENT)}
        if has_tables:
            wait_settled(settings)
        third = backbone.add_gateway()
        assert_drains_are_the_same(backbone, answered)
        for name in (READER, AGENT):
            got[name] += drained_at(backbone, answered.tokens[name], (third, 0, third), 100)
            assert sorted(got[name]) == sorted(answered.pending(name)), name
        assert_the_survivor_can_complete(backbone, answered, tasks["survivor"])
    finally:
        backbone.close()
