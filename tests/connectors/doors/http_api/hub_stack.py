"""Two gateways on one log with agents that they may launch. At its end nothing that was launched runs on."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import yaml

from connectors.hub.launcher.local_processes import stop_all
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import PROJECT_ROOT, AgentMcpSettings, GatewaySettings, Settings, XmlPumpSettings
from tests.broker_processes import BrokerProcess, kafka_at, wait_until
from tests.connectors.doors.http_api.hub_access import PRINCIPALS, GatewayProcess
from tests.own_settings import make_topic
from tests.raw_records import read_to_end

TASKS, TOKENS, MESSAGES = "/api/hub/tasks", "/api/hub/tokens", "/api/hub/messages"
AGENTS, CONTAINERS, AUDIT = "/api/hub/agents", "/api/hub/containers", "/api/hub/audit"
CHECK_S = 0.5

# Agents of the tests, beside the checkout's own: one that only waits, one that tells its token and dies.
_WAIT = "import time; time.sleep(600)"
# No Python: it has to be gone within the launcher's `EARLY_END_S`.
_TELL = 'echo "my token is $TRUNKLINE_AGENT_TOKEN" >&2; exit 1'
_RULES: dict[str, Any] = {
    "test/idle": {"command": ["{python}", "-S", "-c", _WAIT]},
    "test/broken": {"command": ["sh", "-c", _TELL]},
}
_AGENTS: dict[str, dict[str, Any]] = {
    "idle": {"image": "test/idle", "capabilities": ["wait", "rest"]},
    "lazy": {"image": "test/idle"},
    "quiet": {"image": "test/idle", "capabilities": ["wait", "message.broadcast"]},
    "broken": {"image": "test/broken"},
    "unruled": {"image": "test/nobody-runs-this"},
}
_numbers = itertools.count(1)


class Logged(NamedTuple):
    """One record of the log, `source` as in `reactor/reactor`."""

    stream: str
    type: str
    source: str
    body: dict[str, Any]


class Submitted(NamedTuple):
    """A task that was taken, and its token."""

    id: str
    token: str
    answer: dict[str, Any]


class HubStack:
    """Gateways over one data directory and one topic; `close` ends them and all that they have launched."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.gateways: list[GatewayProcess] = []
        self._open = ExitStack()
        self.operator: httpx.Client
        self.other: httpx.Client

    def start(self, count: int = 2) -> None:
        """Start gateways at once and wait until they serve and know the agents."""
        self.gateways = [GatewayProcess(self.settings, self.folder) for _ in range(count)]
        for gateway in self.gateways:
            gateway.wait_ready()
        self.operator, self.other = self.client(), self.client(gateway=-1)
        expected = {*_AGENTS, "echo", "flaky"}
        for client in (self.operator, self.other):
            wait_until(
                lambda client=client: expected <= {a["name"] for a in self.agents(client)}, what="agents"
            )

    def add_gateway(self, **changes: Any) -> GatewayProcess:
        """One more gateway, with other settings."""
        changed = self.settings.gateway.model_copy(update=changes)
        gateway = GatewayProcess(self.settings.model_copy(update={"gateway": changed}), self.folder)
        self.gateways.append(gateway)
        gateway.wait_ready()
        return gateway

    def client(self, token: str | None = None, gateway: int = 0) -> httpx.Client:
        """A client that is closed with the stack; None: the operator's token."""
        return self._open.enter_context(self.gateways[gateway].client(token))

    def principal(self, role: str) -> tuple[str, str]:
        """Add a principal of a new name; its name and its token, which all gateways know."""
        name = f"{role}-{next(_numbers)}"
        answer = self.operator.post(PRINCIPALS, json={"principal": name, "role": role})
        assert answer.status_code == 201, answer.text
        token = str(answer.json()["token"])
        for number in range(len(self.gateways)):
            self._wait_known(name, number)
        return name, token

    def _wait_known(self, name: str, number: int) -> None:
        def known() -> bool:
            shown = client.get(PRINCIPALS).json()["principals"]
            return name in {one["principal"] for one in shown}

        with self.gateways[number].client() as client:
            wait_until(known, what=f"{name} is known at gateway {number}")

    def submit(
        self,
        agent: str,
        description: str = "some work",
        *,
        at: httpx.Client | None = None,
        key: str | None = None,
    ) -> Submitted:
        """Give an agent a task, as the operator unless told otherwise."""
        body = {"agent_name": agent, "description": description}
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = (at or self.operator).post(TASKS, json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        found = answer.json()
        return Submitted(found["task"]["id"], found["token"], found)

    def task(self, task_id: str) -> dict[str, Any]:
        """The task as the hub shows it."""
        return dict(self.operator.get(f"{TASKS}/{task_id}").json())

    def token_of(self, task_id: str) -> dict[str, Any]:
        """The token of a task as the hub shows it."""
        tokens = self.operator.get(TOKENS, params={"limit": 1000}).json()["tokens"]
        (found,) = [token for token in tokens if token["task_id"] == task_id]
        return dict(found)

    def container_of(self, task_id: str) -> dict[str, Any] | None:
        """Return the container of a task, None without one."""
        containers = self.operator.get(CONTAINERS, params={"limit": 1000}).json()["containers"]
        return next((dict(one) for one in containers if one["task_id"] == task_id), None)

    def wait_task(self, task_id: str, status: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """The task, once it has this status."""
        wait_until(lambda: self.task(task_id)["status"] == status, timeout_s, f"the task is {status}")
        return self.task(task_id)

    def wait_recycled(self, task_id: str, timeout_s: float = 20.0) -> None:
        """Wait until nothing that was launched for a task is left."""

        def recycled() -> bool:
            found = self.container_of(task_id)
            return found is not None and found["state"] == "recycled"

        wait_until(recycled, timeout_s, "the container is recycled")
        assert processes_of(task_id) == []

    def agents(self, client: httpx.Client) -> list[dict[str, Any]]:
        """All agents, as a gateway shows them."""
        return list(client.get(AGENTS).json()["agents"])

    def log(self) -> list[Logged]:
        """All that is in the log now."""
        return read_log(self.settings)

    def refusals(self, principal: str) -> list[dict[str, Any]]:
        """Return the recorded refusals of a principal."""
        found = [one for one in self.log() if one.stream == "refused/http"]
        return [one.body for one in found if one.body["principal"] == principal]

    def close(self) -> None:
        """End gateways and agents; nothing of this stack is left."""
        with suppress(httpx.HTTPError, KeyError, ValueError, AttributeError):
            for task in self.operator.get(TASKS, params={"status": "running", "limit": 1000}).json()["tasks"]:
                self.operator.post(f"{TASKS}/{task['id']}/cancel", json={})
        self._open.close()
        for gateway in self.gateways:
            gateway.program.kill()
        stop_all(self.settings, 0.0)
        assert processes_with(str(self.folder)) == []


def read_log(settings: Settings) -> list[Logged]:
    """All records of the topic but the first ones, which are about the topic itself."""
    found: list[Logged] = []
    for record in read_to_end(settings.kafka):
        headers = {name: value.decode() for name, value in record.headers}
        said = (headers["ce_type"], headers["ce_source"], json.loads(record.value))
        found.append(Logged(record.key.decode(), *said))
    return [one for one in found if not one.stream.startswith(("control/topology", "control/macs-"))]


def processes_with(text: str) -> list[int]:
    """The processes that have this text in their environment."""
    found: list[int] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_there = process.status() != psutil.STATUS_ZOMBIE
            if is_there and any(text in value for value in process.environ().values()):
                found.append(process.pid)
    return found


def processes_of(task_id: str) -> list[int]:
    """The processes that were launched for a task."""
    return processes_with(task_id)


def one_of(found: Sequence[Any]) -> Any:
    """The only element."""
    (only,) = found
    return only


def wait_quiet(task_ids: Sequence[str], quiet_s: float = 1.5) -> None:
    """Wait until nothing runs for any of these tasks, and nothing comes for a while."""
    silent_since = time.monotonic()

    def quiet() -> bool:
        nonlocal silent_since
        if any(processes_of(task_id) for task_id in task_ids):
            silent_since = time.monotonic()
        return time.monotonic() - silent_since >= quiet_s

    # Each look asks every process of the machine.
    wait_until(quiet, 30, "no process of these tasks is left")


def hub_settings(broker: BrokerProcess, folder: Path) -> Settings:
    """Settings with topic, data directory, agents and launchers of their own."""
    own = f"hub.{folder.name}.{next(_numbers)}"
    agents = folder / "agents.d"
    shutil.copytree(PROJECT_ROOT / "conf" / "agents", agents)
    for name, fields in _AGENTS.items():
        write_agent(agents, name, **fields)
    rules = yaml.safe_load((PROJECT_ROOT / "conf" / "launchers.yaml").read_text())
    launchers = folder / "launchers.yaml"
    launchers.write_text(yaml.safe_dump({**rules, **_RULES}))
    settings = Settings(
        data_dir=folder / "data",
        kafka=kafka_at(broker.port, topic=own, delivery_timeout_s=10),
        agent_mcp=AgentMcpSettings(port=0, spawn_image="test/idle"),
        xml_pump=XmlPumpSettings(organism_file=folder / "organism.yaml"),
        gateway=GatewaySettings(
            reactor_group=own, task_check_s=CHECK_S, stop_grace_s=2, agents_dir=agents, launchers_file=launchers
        ),
    )
    ensure_keyring(settings)
    make_topic(settings)
    return settings


def said(answer: httpx.Response) -> tuple[int, str | None]:
    """Return status and reason of an answer."""
    return answer.status_code, answer.json().get("reason")


def post(
    client: httpx.Client, recipient: str, payload: Any = None, kind: str = "note", **headers: str
) -> httpx.Response:
    """Send a message; returns the answer."""
    body = {"recipient": recipient, "type": kind, "payload": payload}
    return client.post(MESSAGES, json=body, headers=headers)


def end(
    client: httpx.Client, task: Any, how: str, body: dict[str, Any] | None = None, **headers: str
) -> httpx.Response:
    """Ask for the end of a task: `how` is complete, fail or cancel."""
    return client.post(f"{TASKS}/{task.id}/{how}", json=body or {}, headers=headers)


def write_agent(folder: Path, name: str, **fields: Any) -> Path:
    """Write an agent's definition in one step."""
    body = {"name": name, "description": f"{name} of the tests", **fields}
    draft = folder / f".{name}"
    draft.write_text(json.dumps(body))
    return draft.replace(folder / f"{name}.json")
