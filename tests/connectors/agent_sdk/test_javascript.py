"""The JavaScript library: its own tests, its package, and agents and jobs on it at a real gateway and bridge."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.keys.sealing import load_keyring
from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import BrokerProcess
from tests.connectors.gateway.hub_access import add_principal
from tests.connectors.mqtt_agents.mail_run import MailRun
from tests.own_settings import own_settings
from tests.programs import required_program, run_program

PACKAGE = PROJECT_ROOT / "connectors" / "agent_sdk" / "js"
PROGRAMS = Path(__file__).parent / "javascript"
NPM_S = 180
# What the package needs from npm in tests. The versions are those that the tests were written with.
FROM_NPM = ("mqtt@5.16.0", "typescript@5.9.3", "@types/node@20.19.0")
QUIET = ("--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock")


@pytest.fixture(scope="session")
def node() -> str:
    """Node.js."""
    return required_program("nodejs", "node")


@pytest.fixture(scope="session")
def npm(node: str) -> str:
    """The package manager of Node.js, which Debian has apart from it."""
    return required_program("npm", "npm")


def npm_run(npm: str, folder: Path, *arguments: str) -> str:
    """Run npm in a folder; returns its output."""
    done = run_program([npm, *arguments], NPM_S, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tarball(npm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as `npm pack` makes it."""
    folder = tmp_path_factory.mktemp("packed")
    (made,) = json.loads(npm_run(npm, PACKAGE, "pack", "--json", "--pack-destination", str(folder)))
    return folder / made["filename"]


def project(folder: Path, npm: str, tarball: Path, *packages: str) -> Path:
    """A new project with the package, and these packages from npm."""
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    offline = () if packages else ("--offline",)
    npm_run(npm, folder, "install", *QUIET, "--prefer-offline", *offline, str(tarball), *packages)
    for program in PROGRAMS.iterdir():
        shutil.copy(program, folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, npm: str, tarball: Path) -> Path:
    """A project that has the package and no other."""
    return project(tmp_path_factory.mktemp("bare") / "project", npm, tarball)


@pytest.fixture(scope="module")
def equipped(tmp_path_factory: pytest.TempPathFactory, npm: str, tarball: Path) -> Path:
    """A project that has the package, `mqtt` and TypeScript."""
    return project(tmp_path_factory.mktemp("equipped") / "project", npm, tarball, *FROM_NPM)


@pytest.fixture(scope="module")
def run(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MailRun]:
    """Gateway and bridge over a topic of their own."""
    folder = tmp_path_factory.mktemp("javascript")
    settings = own_settings(kafka_broker, mosquitto_broker, folder)
    found = MailRun(settings, load_keyring(settings), folder)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def tokens(run: MailRun) -> dict[str, str]:
    """The variables of the programs: the gateway's address and the tokens of its principals."""
    roles = {"ann": "worker", "bo": "worker", "delegator": "delegator"}
    made = {
        f"{name.upper()}_TOKEN": add_principal(run.operator, name, role) for name, role in roles.items()
    }
    return {"HUB_URL": run.gateway.url, **made}


def node_tests(node: str, folder: Path, *files: str, **variables: str) -> None:
    """Run files of tests with Node's own runner, and fail with its report."""
    command = [node, "--test", "--test-reporter=spec", *files]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    done = run_program(command, 120, folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.requirement("AG-63")
def test_agents_in_javascript_exchange_messages_at_a_real_gateway(
    node: str, bare: Path, tokens: dict[str, str]
) -> None:
    node_tests(node, bare, "mailbox.test.mjs", **tokens)


@pytest.mark.requirement("AG-64")
def test_jobs_in_javascript_run_to_their_end_over_http(node: str, bare: Path, tokens: dict[str, str]) -> None:
    node_tests(node, bare, "jobs.test.mjs", **tokens)


@pytest.mark.requirement("AG-65")
def test_jobs_in_javascript_run_to_their_end_over_mqtt(
    node: str, equipped: Path, run: MailRun, tokens: dict[str, str]
) -> None:
    mqtt = run.settings.mqtt
    more = {"MQTT_PORT": str(mqtt.port), "MQTT_TOPICS": mqtt.topic_prefix}
    node_tests(node, equipped, "jobs.test.mjs", **tokens, **more)
