"""The publishers of docs/how-to/publish_from_another_language.md, against a real broker and a real bridge.

The test takes the files from the page itself. Mosquitto is the local stack's own, with passwords and rights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from connectors.doors.mqtt_accounts.mosquitto_files import (
    PASSWORDS,
    password_line,
    read_lines,
    reload_broker,
    write_acl,
    write_lines,
)
from connectors.log.publisher import Publisher
from connectors.plumbing.mqtt_link.broker_settings import DELEGATOR, role_mqtt
from connectors.programs.local_stack import LocalStack
from schemas.keys.sealing import Keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.job.job_registry import JobEvent
from tests.broker_processes import ProgramProcess, wait_until, with_mqtt
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.connectors.verdict_server import VerdictServer
from tests.mqtt_wire import listening
from tests.programs import required_program
from tests.registered_jobs import register_job
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login
from trunkline_agent.wire.job_event import EVENTS
from trunkline_agent.wire.mqtt_password import mqtt_password
from trunkline_agent.wire.receipt import Receipt
from trunkline_agent.wire.signing import new_secret

pytestmark = pytest.mark.requirement("OP-40")

PAGE = (PROJECT_ROOT / "docs" / "how-to" / "publish_from_another_language.md").read_text(encoding="utf-8")
FILES = {
    name: text
    for text, name in re.findall(r"```(?:python|javascript)\n((?:#|//) (\S+): .*?)\n```", PAGE, re.DOTALL)
}
VECTORS: list[dict[str, str]] = json.loads(re.findall(r"```json\n(\[.*?\n\])\n```", PAGE, re.DOTALL)[0])
COMMANDS = {"python": (sys.executable, "publish.py"), "javascript": ("node", "publish.mjs")}
# Longer than a verdict takes on a busy machine; the publishers of the page wait 15 s.
VERDICT_S = 10
TAG = "5e0c41aa"


class Door(NamedTuple):
    """A bridge between a broker with accounts and the log, and jobs in it: `jobs[language, is_rotated]`."""

    settings: Settings
    jobs: dict[tuple[str, bool], tuple[str, str]]


@pytest.fixture(scope="session")
def node() -> str:
    """Node.js, for the publisher in JavaScript."""
    return required_program("nodejs", "node")


@pytest.fixture
def folder(tmp_path: Path, node: str) -> Path:
    """A folder with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The local stack's own Mosquitto."""
    with LocalStack(settings_in(tmp_path_factory.mktemp("guarded")), ("mosquitto",)) as stack:
        yield stack


@pytest.fixture
def door(
    mosquitto: LocalStack,
    backbone_settings: Settings,
    keyring: Keyring,
    start_bridge: Callable[[Settings], ProgramProcess],
) -> Iterator[Door]:
    """Registered jobs with their accounts, and a bridge that follows the verdicts of a real fold."""
    mqtt = mosquitto.settings.mqtt
    roles = (mosquitto.settings.data_path / "keys" / "mqtt.json").read_bytes()
    keys = backbone_settings.data_path / "keys"
    keys.mkdir(parents=True, exist_ok=True)
    (keys / "mqtt.json").touch(0o600)
    (keys / "mqtt.json").write_bytes(roles)
    here = {"port": mqtt.port, "topic_prefix": mqtt.topic_prefix, "agents_prefix": mqtt.agents_prefix}
    verdicts = VerdictServer(with_mqtt(backbone_settings, receipt_verdict_wait_s=VERDICT_S, **here))
    jobs = {}
    with Publisher(backbone_settings) as publisher:
        for language in COMMANDS:
            for is_rotated in (False, True):
                secret = f"{TAG}.{new_secret()}" if is_rotated else new_secret()
                jobs[language, is_rotated] = (
                    register_job(publisher, keyring, "x", secret=secret).job_id,
                    secret,
                )
    make_accounts(mosquitto.settings, [*jobs.values()])
    bridge = start_bridge(verdicts.settings)
    wait_until(lambda: "verdicts_open" in bridge.log(), what="the verdict stream")
    yield Door(verdicts.settings, jobs)
    verdicts.close()


def make_accounts(settings: Settings, jobs: list[tuple[str, str]]) -> None:
    """Register jobs and rotate their secrets, as the gateway does."""
    mqtt = settings.mqtt
    assert mqtt.accounts_dir is not None
    users = {f"{job}.{TAG}" if "." in secret else job: secret for job, secret in jobs}
    passwords = {user: mqtt_password(secret, user) for user, secret in users.items()}
    lines = read_lines(mqtt.accounts_dir / PASSWORDS)
    lines |= {user: password_line(user, password) for user, password in passwords.items()}
    write_lines(mqtt.accounts_dir / PASSWORDS, lines.values())
    write_acl(mqtt.accounts_dir, mqtt, users)
    assert reload_broker(mqtt.accounts_dir)
    for user, password in passwords.items():

        def let_in(user: str = user, password: str = password) -> bool:
            return try_login(mqtt, user, password, timeout_s=5) is LoginAnswer.LET_IN

        wait_until(let_in, what=f"the account {user}")


def published(folder: Path, language: str, settings: Settings, job: tuple[str, str], *event: str) -> Any:
    """Run the page's publisher; its exit code and the receipt that it prints."""
    environment = {
        "PATH": os.environ["PATH"],
        "JOB_ID": job[0],
        "JOB_SECRET": job[1],
        "JOB_TOPICS": settings.mqtt.topic_prefix,
        "MQTT_PORT": str(settings.mqtt.port),
    }
    command = COMMANDS[language]
    done = subprocess.run(
        [*command, *event], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.mark.requirement("JE-17")
@pytest.mark.parametrize("language", COMMANDS)
def test_the_publishers_of_the_page_get_receipts_with_verdicts(folder: Path, door: Door, language: str) -> None:
    for is_rotated in (False, True):
        job = door.jobs[language, is_rotated]
        events = [("started", "gr\u00f6\u00dfer \u2028 \U0001f600"), ("progress", "3 of 10"), ("completed", "")]
        for seq, event in enumerate(events, start=1):
            code, receipt = published(folder, language, door.settings, job, str(seq), *event)
            assert (code, receipt["seq"], receipt["verdict"]) == (0, seq, "accepted"), receipt
            assert sorted(receipt) == ["ce_id", "position", "reason", "seq", "verdict"]
        code, receipt = published(folder, language, door.settings, job, "4", "progress", "too late")
        assert (code, receipt["verdict"], receipt["reason"]) == (4, "rejected", "after_terminal")
        # The end is retained, and nothing else is: a subscriber that connects later receives it.
        with listening(role_mqtt(door.settings, DELEGATOR), f"{job[0]}/events") as late:
            wait_until(lambda late=late: late, what="the retained event")
        assert [json.loads(message.payload)["event"] for message in late] == ["completed"]


@pytest.mark.requirement("JE-05")
def test_the_signer_in_javascript_gives_the_published_signatures_or_refuses(folder: Path) -> None:
    (folder / "vectors.json").write_text(json.dumps(VECTORS), encoding="utf-8")
    check = """
        import { readFileSync } from "node:fs";
        import { sign } from "./sign.mjs";
        for (const vector of JSON.parse(readFileSync("vectors.json"))) {
          let found;
          try { found = sign(JSON.parse(vector.event), vector.secret).data.hmac_sig; }
          catch (error) { found = error.name; }
          console.log(JSON.stringify([vector.name, found]));
        }"""
    command = ["node", "--input-type=module", "--eval", check]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    refused = {name for name, signature in found.items() if signature == "RangeError"}
    assert refused == {"floats", "64-bit integers"}
    # `1E+2` is a float, and JavaScript cannot tell it from 100.
    exact = [
        vector for vector in VECTORS if vector["name"] not in {*refused, "another spelling of the same content"}
    ]
    assert len(exact) >= 7
    assert {vector["name"]: found[vector["name"]] for vector in exact} == {
        vector["name"]: vector["hmac_sig"] for vector in exact
    }


def test_the_page_names_every_field_of_the_receipt_and_every_event() -> None:
    for name in (*(one.name for one in fields(Receipt)), *JobEvent.model_fields):
        assert re.search(rf"^\| `{name}` \|", PAGE, re.MULTILINE), name
    assert all(f"`{event}`" in PAGE for event in EVENTS)
