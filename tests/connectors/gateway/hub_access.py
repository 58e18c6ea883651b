"""A gateway process and how tests talk to it: a client for each role, and server-sent events, parsed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from schemas.settings import Settings
from tests.broker_processes import LOOPBACK, ProgramProcess, free_port

JOBS, SESSIONS, PRINCIPALS = "/api/hub/jobs", "/api/hub/sessions", "/api/hub/principals"
TIMEOUT_S = 20.0


class GatewayProcess:
    """One running gateway."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        port = free_port()
        changed = settings.gateway.model_copy(update={"port": port})
        self.settings = settings.model_copy(update={"gateway": changed})
        self.url = f"http://{LOOPBACK}:{port}"
        self.program = ProgramProcess("connectors.gateway", self.settings, folder, f"gateway{port}")

    @property
    def operator_token(self) -> str:
        """The operator's token."""
        return self.settings.operator_token_file.read_text().strip()

    def client(self, token: str | None = None) -> httpx.Client:
        """A client with this token; None: the operator's; "": none."""
        found = self.operator_token if token is None else token
        headers = {"Authorization": f"Bearer {found}"} if found else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S, trust_env=False)


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


def register(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """Register a job; returns the answer."""
    answer = client.post(JOBS, json={"description": "build the docs", **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())
