"""A job with a broker of its own, from registration to end, by the commands that a user runs (JE-13)."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.doors.mqtt_accounts.mosquitto_files import password_line
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.local_stack import free_port
from connectors.programs.processes.session_host import SessionHost
from connectors.tools.job_tools.job_files import (
    broker_file,
    find_broker,
    secret_path,
    store_broker,
    store_secret,
    with_job_broker,
)
from schemas.settings.settings import Settings
from tests.broker_processes import LOOPBACK, BrokerProcess, make_mosquitto, wait_until, with_mqtt
from tests.connectors.cli.conftest import CommandLine, json_of
from trunkline_agent.errors import TrunklineError, UsageError

pytestmark = pytest.mark.requirement("JE-13")
USER, PASSWORD = "bo", "canary-broker-51d0"
JOB, OTHER = "0a1b2c3d", "4e5f6a7b"
AGENT = [sys.executable, "-m", "connectors.tools.samples.sample_agent"]


@pytest.fixture
def other_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A second Mosquitto, one that asks for a password."""
    passwords = tmp_path / "passwords"
    passwords.write_text(password_line(USER, PASSWORD) + "\n")
    passwords.chmod(0o600)
    broker = make_mosquitto(tmp_path / "other", f"allow_anonymous false\npassword_file {passwords}\n")
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def overlay(other_broker: BrokerProcess, tmp_path: Path) -> str:
    """The 0600 file that names the second broker, for `--broker-file`."""
    file = tmp_path / "broker.json"
    file.touch(0o600)
    fields = {"host": LOOPBACK, "port": other_broker.port, "username": USER, "password": PASSWORD}
    file.write_text(json.dumps(fields))
    return str(file)


@pytest.fixture
def bridge(hub: GatewayClient, hub_settings: Settings, start_bridge: Any) -> Any:
    """The bridge, with the gateway's verdicts; it looks often for brokers of live jobs."""
    found = start_bridge(with_mqtt(hub_settings, overlay_poll_s=0.2, receipt_verdict_wait_s=10))
    wait_until(lambda: "verdicts_open" in found.log(), what="the verdict stream")
    return found


@pytest.fixture
def elsewhere(hub_settings: Settings, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line of another machine: state of its own, no master key, and nobody at the broker of its
    environment, so that whoever does not go to the job's own broker gets nowhere.
    """
    away = with_mqtt(hub_settings, port=free_port(), publish_attempts=2)
    gateway = away.gateway.model_copy(update={"operator_token_file": hub_settings.operator_token_file})
    found = CommandLine(away.model_copy(update={"data_dir": tmp_path / "elsewhere", "gateway": gateway}))
    yield found
    found.end()


def _wait_for_bridge(bridge: Any, overlay: str) -> None:
    # With a watch there the broker no longer says that nobody listens, and publish would not send again.
    name = f"{LOOPBACK}:{json.loads(Path(overlay).read_text())['port']}"
    wait_until(
        lambda: any('"subscribed"' in line and name in line for line in bridge.log().splitlines()),
        what="the bridge at the job's broker",
    )


def _watch(trunkline: CommandLine, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    ready = tmp_path / f"watch-{len(trunkline.started)}.ready"
    process = trunkline.start("watch", *arguments, "--timeout", "60s", TRUNKLINE_READY_FILE=str(ready))
    wait_until(lambda: ready.exists() or process.poll() is not None, what="the subscription")
    return process


def _ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=60)
    assert PASSWORD not in out + err
    return process.returncode, [json.loads(line)["event"] for line in out.splitlines()], err


@pytest.mark.requirement("CM-05")
def test_a_job_is_picked_published_and_watched_at_its_own_broker_by_our_commands(
    trunkline: CommandLine,
    elsewhere: CommandLine,
    hub: GatewayClient,
    bridge: Any,
    overlay: str,
    tmp_path: Path,
) -> None:
    made = trunkline.call("jobs", "register", "--description", "x", "--broker-file", overlay, "--json")
    job = json_of(made)["job_id"]
    picked = elsewhere.call("jobs", "pick", "--session", "s1")
    assert picked.returncode == 0
    assert f"broker  host {LOOPBACK}, port " in picked.stdout
    assert f"username {USER}" in picked.stdout
    kept = broker_file(secret_path(elsewhere.settings, job))
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    _wait_for_bridge(bridge, overlay)
    watching = _watch(elsewhere, tmp_path, "--job", job)
    assert PASSWORD.encode() not in Path(f"/proc/{watching.pid}/cmdline").read_bytes()
    for event in ("started", "completed"):
        done = elsewhere.run("publish", "--job", job, "--event", event, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["verdict"] == "accepted"
        assert PASSWORD not in done.stdout + done.stderr
    assert _ended(watching)[:2] == (0, ["started", "completed"])
    assert hub.get(path_of("jobs", job))["status"] == "completed"
    # The registering machine keeps the broker, too; a late watch gets the retained end, also with --all.
    assert _ended(_watch(trunkline, tmp_path, "--job", job))[:2] == (0, ["completed"])
    second = trunkline.json("jobs", "register", "--description", "y", "--broker-file", overlay)
    following = _watch(trunkline, tmp_path, "--all")
    published = trunkline.run("publish", "--job", second["job_id"], "--event", "error", "--detail", "red")
    assert published.returncode == 0, published.stderr
    code, events, _ = _ended(following)
    assert (code, events) == (1, ["completed", "error"])
    shown = trunkline.call("jobs", "show", job).stdout
    assert f"username {USER}" in shown
    told = (made.stdout, picked.stdout, shown, bridge.log())
    assert not [text for text in told if PASSWORD in text or "sealed" in text]


@pytest.mark.requirement("CM-05")
def test_without_a_kept_broker_watch_asks_the_gateway_and_says_what_to_do_when_it_cannot_have_the_password(
    trunkline: CommandLine,
    elsewhere: CommandLine,
    hub: GatewayClient,
    bridge: Any,
    overlay: str,
    tmp_path: Path,
) -> None:
    told = trunkline.json("jobs", "register", "--description", "x", "--broker-file", overlay)
    job, secret = told["job_id"], told["secret"]
    _wait_for_bridge(bridge, overlay)
    # A machine that has the secret and nothing else.
    store_secret(elsewhere.settings, job, secret)
    refused = elsewhere.call("watch", "--job", job, "--timeout", "20s")
    assert (refused.returncode, refused.stdout) == (4, "")
    for said in ("refuses", "TRUNKLINE__MASTER_KEY", f"watch --job {job} --settled"):
        assert said in refused.stderr
    # With the master key it opens the sealed password.
    key = elsewhere.settings.model_copy(update={"master_key_file": trunkline.settings.key_file})
    holder = CommandLine(key)
    watching = _watch(holder, tmp_path, "--job", job)
    published = trunkline.run("publish", "--job", job, "--event", "completed")
    assert published.returncode == 0, published.stderr
    assert _ended(watching)[:2] == (0, ["completed"])
    # A client that may only read jobs gets the broker's address, but not even the sealed password.
    viewer = trunkline.json("principals", "add", "ann", "--role", "viewer")["token"]
    shown = elsewhere.json("jobs", "show", job, TRUNKLINE_TOKEN=viewer)["broker"]
    assert (shown["host"], shown["username"], shown["sealed_password"]) == (LOOPBACK, USER, None)
    assert hub.get(path_of("jobs", job))["broker"]["sealed_password"] is not None
    # Without a gateway it says so, and listens at the broker of the settings.
    gone = CommandLine(with_gateway_port(key, free_port()).model_copy(update={"mqtt": trunkline.settings.mqtt}))
    done = gone.call("watch", "--job", job, "--timeout", "1s")
    assert done.returncode == 2
    assert "not known whether" in done.stderr
    for text in (refused.stderr, done.stderr):
        assert PASSWORD not in text
        assert secret not in text


def with_gateway_port(settings: Settings, port: int) -> Settings:
    """`settings` whose gateway is on another port."""
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"port": port})})


@pytest.mark.requirement("JE-24")
@pytest.mark.requirement("CM-05")
def test_submit_gives_the_job_its_own_broker_and_the_agent_finds_it(
    trunkline: CommandLine,
    hub: GatewayClient,
    bridge: Any,
    overlay: str,
    host: SessionHost,
) -> None:
    # The agent's environment names a broker where nobody is.
    nowhere = CommandLine(with_mqtt(trunkline.settings, port=free_port(), publish_attempts=2))
    options = ("--session", "own", "--broker-file", overlay, "--json")
    agent = ("sh", "-c", f"echo progress half | {shlex.join(AGENT)}")
    done = nowhere.run("jobs", "submit", "x", *options, "--", *agent)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["status"] == "completed"
    lines = Path(told["subscriber_out"]).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "progress", "completed"]
    assert PASSWORD not in done.stdout + done.stderr
    twice = nowhere.call(
        "jobs", "submit", "x", "--session", "s", "--broker-file", "-", "--instructions", "-", "--", "x"
    )
    assert (twice.returncode, "standard input" in twice.stderr) == (2, True)


@pytest.mark.requirement("CM-05")
def test_the_broker_option_takes_an_address_and_nothing_secret(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    for text, host, port in (
        ("mq.example", "mq.example", None),
        ("mq.example:1884", "mq.example", 1884),
        ("[::1]:1884", "::1", 1884),
    ):
        file = tmp_path / f"secret-{host}-{port}"
        arguments = ("--broker", text, "--secret-file", str(file))
        job = trunkline.json("jobs", "register", "--description", "x", *arguments)
        assert job["broker_file"] == f"{file}.broker"
        shown = hub.get(path_of("jobs", job["job_id"]))["broker"]
        assert (shown["host"], shown["port"]) == (host, port)
        mqtt = with_job_broker(trunkline.settings, job["job_id"], file).mqtt
        assert (mqtt.host, mqtt.port) == (host, port or trunkline.settings.mqtt.port)
    for wrong in ("mq.example:0", "mq.example:70000", "a:b", "::1", "", f"bo:{PASSWORD}@mq.example", "/x.json"):
        refused = trunkline.call("jobs", "register", "--description", "x", "--broker", wrong)
        assert refused.returncode == 2
        assert "--broker-file" in refused.stderr
        assert PASSWORD not in refused.stderr
    both = ("--broker", "mq.example", "--broker-file", "x")
    assert trunkline.call("jobs", "register", "--description", "x", *both).returncode == 2
    # A job without a broker of its own has none, and nothing is left beside its secret's file.
    file = tmp_path / "plain"
    plain = trunkline.json("jobs", "register", "--description", "x", "--secret-file", str(file))
    assert hub.get(path_of("jobs", plain["job_id"]))["broker"] is None
    assert not broker_file(file).exists()


def test_what_is_kept_beside_the_secret_counts_for_its_job_alone_and_is_not_quoted(
    hub_settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "job.secret"
    store_broker(file, JOB, {"host": "mq.example", "port": None, "password": PASSWORD})
    found = find_broker(file, JOB)
    assert found is not None
    assert PASSWORD not in repr(found)
    mqtt = with_job_broker(hub_settings, JOB, file).mqtt
    assert (mqtt.host, mqtt.port, mqtt.password.get_secret_value()) == (  # type: ignore[union-attr]
        "mq.example",
        hub_settings.mqtt.port,
        PASSWORD,
    )
    # Left by another job; and nothing known of this one here.
    assert find_broker(file, OTHER) is None
    assert with_job_broker(hub_settings, OTHER, file) is hub_settings
    # Known to have none.
    store_broker(secret_path(hub_settings, OTHER), OTHER, None)
    assert with_job_broker(hub_settings, OTHER).mqtt == hub_settings.mqtt
    kept = broker_file(file)
    for text in ("", "[]", "{}", f'{{"job_id": "{JOB}", "broker": {{"tls": "{PASSWORD}"}}}}'):
        kept.write_text(text)
        with pytest.raises(TrunklineError) as told:
            find_broker(file, JOB)
        assert PASSWORD not in str(told.value)
        assert told.value.__cause__ is None
    kept.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        find_broker(file, JOB)
