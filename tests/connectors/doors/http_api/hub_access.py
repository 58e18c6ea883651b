"""A gateway process and how tests talk to it: a client for each role, and server-sent events, parsed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.settled_feed import SettledRecord
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import LOOPBACK, START_S, ProgramProcess, free_port, wait_until
from trunkline_agent.wire.verdicts import ACCEPTED

JOBS, SESSIONS, PRINCIPALS = "/api/hub/jobs", "/api/hub/sessions", "/api/hub/principals"
TIMEOUT_S = 20.0


class GatewayProcess:
    """One running gateway."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        port = free_port()
        changed = settings.gateway.model_copy(update={"port": port})
        self.settings = settings.model_copy(update={"gateway": changed})
        self.url = f"http://{LOOPBACK}:{port}"
        self.program = ProgramProcess(
            "connectors.programs.gateway_program", self.settings, folder, f"gateway{port}"
        )

    @property
    def operator_token(self) -> str:
        """The operator's token."""
        return self.settings.operator_token_file.read_text().strip()

    def client(self, token: str | None = None) -> httpx.Client:
        """A client with this token; None: the operator's; "": none."""
        found = self.operator_token if token is None else token
        headers = {"Authorization": f"Bearer {found}"} if found else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until it serves and has declared its agents, which it does when it serves already: who follows
        its events from then on sees nothing of that.
        """
        self.program.wait_ready(timeout_s)
        declared = {path.stem for path in (PROJECT_ROOT / self.settings.gateway.agents_dir).glob("*.json")}

        def known() -> bool:
            return declared <= {agent["name"] for agent in client.get("/api/hub/agents").json()["agents"]}

        with self.client() as client:
            wait_until(known, what=f"the agents {declared}")


Gateway = TypeVar("Gateway", bound=GatewayProcess)


@contextmanager
def starting(
    kind: Callable[[Settings, Path], Gateway], settings: Settings, folder: Path
) -> Iterator[Callable[..., Gateway]]:
    """Gives a function that starts gateways of a kind and waits until they serve and know their agents; all of
    them end with it.
    """
    started: list[Gateway] = []

    def start(other: Settings | None = None) -> Gateway:
        gateway = kind(other or settings, folder)
        started.append(gateway)
        gateway.wait_ready()
        return gateway

    try:
        yield start
    finally:
        for gateway in started:
            gateway.program.kill()


class ServerEvent(NamedTuple):
    """One server-sent event."""

    name: str
    id: str
    data: Any


def server_events(answer: httpx.Response) -> Iterator[ServerEvent]:
    """The events of a stream; comments are left out. Fails when it has said nothing but pings for long."""
    fields: dict[str, str] = {}
    deadline = time.monotonic() + 2 * TIMEOUT_S
    for line in answer.iter_lines():
        assert time.monotonic() < deadline, "nothing but pings"
        if line.startswith(":"):
            continue
        if not line:
            if "data" in fields:
                yield ServerEvent(fields["event"], fields["id"], json.loads(fields["data"]))
            fields = {}
            continue
        name, _, value = line.partition(": ")
        fields[name] = value


def add_principal(operator: httpx.Client, name: str, role: str) -> str:
    """Add a principal; returns its token."""
    answer = operator.post(PRINCIPALS, json={"principal": name, "role": role})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["token"])


def limit_to_one(operator: httpx.Client, name: str) -> None:
    """Let a mailbox have one message that waits."""
    answer = operator.post(f"/api/hub/limits/name/{name}", json={"pending_most": 1})
    assert answer.status_code == 200, answer.text


def register(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """Register a job; returns the answer."""
    answer = client.post(JOBS, json={"description": "build the docs", **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def sample(page: dict[str, Any], schema: dict[str, Any], names: dict[str, Any]) -> Any:
    """The least that a schema of the page takes; `names` has what a field of this name must hold."""
    if "$ref" in schema:
        schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return sample(page, schema["anyOf"][0], names)
    if "enum" in schema:
        return schema["enum"][-1]
    if schema.get("type") == "object":
        fields = schema.get("properties", {})
        return {
            name: names[name] if name in names else sample(page, fields[name], names)
            for name in schema.get("required", ())
        }
    return {"integer": schema.get("minimum", 1), "boolean": False, "array": []}.get(schema.get("type"), "x")


def settled_log(settings: Settings) -> list[SettledRecord]:
    """The records of the log, with the fold's verdicts."""
    found: list[SettledRecord] = []
    view = LiveView(settings, load_keyring(settings))
    view.on_settled(found.extend)
    try:
        view.open()
    finally:
        view.close()
    return found


def accepted_of_operator(settings: Settings) -> int:
    """How many of the operator's requests but broadcasts have had an effect, by the whole log and the fold."""
    own = [one for one in settled_log(settings) if (one.principal, one.verdict) == ("http/operator", ACCEPTED)]
    # A broadcast is as many records as there are recipients.
    return len([one for one in own if b'"broadcast_id"' not in one.value])
