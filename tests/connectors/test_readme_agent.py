"""The agent of the README runs as it is printed, against a real gateway."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess, starting
from trunkline_agent.credentials import Credentials, HubAccess

PROGRAM = re.findall(
    r"```python\n(.*?)```", (PROJECT_ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)
MESSAGES, PRINCIPALS = "/api/hub/messages", "/api/hub/principals"


@pytest.mark.requirement("HO-14")
def test_the_agent_of_the_readme_answers_each_message_once(backbone_settings: Settings, tmp_path: Path) -> None:
    (program,) = PROGRAM
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    with starting(GatewayProcess, backbone_settings, tmp_path) as start:
        gateway = start()
        with gateway.client() as operator:
            made = operator.post(PRINCIPALS, json={"principal": "echo", "role": "worker"}).raise_for_status()
            access = HubAccess(gateway.url, made.json()["token"])
            Credentials("echo", hub=access).save(tmp_path / "echo.json")
            (tmp_path / "agent.py").write_text(program)
            agent = subprocess.Popen([sys.executable, "agent.py"], cwd=tmp_path)
            try:
                body = {"recipient": "echo", "type": "ask", "payload": {"text": "hello"}}
                operator.post(MESSAGES, json=body).raise_for_status()
                found = wait_until(lambda: operator.get(MESSAGES).json()["messages"], what="the agent's answer")
            finally:
                agent.kill()
                agent.wait(20)
    (answer,) = found
    assert (answer["sender"], answer["payload"]) == ("echo", {"text": "you wrote {'text': 'hello'}"})
