"""The stack's own broker with passwords: bridge, gateway and jobs get in, whoever registered them."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from connectors.log.publisher import Publisher
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.plumbing.mqtt_link.broker_settings import load_role_passwords
from connectors.programs.local_stack import LocalStack, child_process, control
from schemas.keys.sealing import load_keyring
from tests.broker_processes import wait_until, with_mqtt
from tests.connectors.programs.local_stack.conftest import Cli, settings_in
from tests.faults.test_pickers import folded
from tests.registered_jobs import register_job
from trunkline_agent.broker import job_broker
from trunkline_agent.errors import EventRejected
from trunkline_agent.jobs.job import Job
from trunkline_agent.mqtt.mqtt_client import NOT_AUTHORIZED, LoginAnswer, try_login, wait_for_login
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.wire.mqtt_password import mqtt_password

pytestmark = pytest.mark.stack

PARTS = ("kafka", "mosquitto", "bridge", "gateway")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    # A slow machine is no reason for a receipt without a verdict.
    settings = with_mqtt(settings_in(tmp_path_factory.mktemp("stack") / "data"), receipt_verdict_wait_s=10)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(child_process, "EVERY_S", 0.2)
        with LocalStack(settings, PARTS) as running:
            yield running


@pytest.mark.requirement("JE-17")
def test_a_job_registered_at_the_gateway_publishes_at_once_and_hears_its_verdicts(
    stack: LocalStack, tmp_path: Path
) -> None:
    with GatewayClient(stack.settings) as gateway:
        job = gateway.post("/api/hub/jobs", {"description": "publish at once"})
    password = mqtt_password(job["secret"], job["job_id"])
    assert try_login(stack.settings.mqtt, job["job_id"], password) is LoginAnswer.LET_IN
    publisher = Job(job["job_id"], job["secret"], mqtt=stack.settings.mqtt, state_dir=tmp_path)
    publisher.publish("started", "")
    # Right after the start the bridge may not have found the gateway yet; its receipts then say nothing.
    wait_until(lambda: publisher.publish("progress", "").verdict == "accepted", 30, "a receipt with a verdict")
    second_state = tmp_path / "another machine"
    with pytest.raises(EventRejected, match="seq_conflict"):
        Job(job["job_id"], job["secret"], mqtt=stack.settings.mqtt, state_dir=second_state).publish(
            "progress", "me too"
        )


def test_a_job_registered_past_the_gateway_gets_its_account_all_the_same(
    stack: LocalStack, tmp_path: Path
) -> None:
    with Publisher(stack.settings) as log:
        job = register_job(log, load_keyring(stack.settings), "straight into the log")
    wait_for_login(job_broker(stack.settings.mqtt, job.job_id, job.secret), 10)
    receipt = Job(job.job_id, job.secret, mqtt=stack.settings.mqtt, state_dir=tmp_path).publish("started", "")
    assert receipt.position is not None


@pytest.mark.requirement("LM-10")
def test_a_flooding_agent_is_paused_by_the_broker_within_seconds_and_one_refusal_says_so(
    stack: LocalStack,
) -> None:
    with GatewayClient(stack.settings) as gateway:
        grant = gateway.post("/api/hub/agents/flooder/mqtt")
        gateway.post("/api/hub/limits/name/flooder", {"messages_per_minute": 60})
        login = {"username": grant["username"], "password": SecretStr(grant["password"])}
        connection = MqttConnection(stack.settings.mqtt.model_copy(update=login))
        connection.open()
        began, reasons = time.monotonic(), set[int]()
        while NOT_AUTHORIZED not in reasons and time.monotonic() - began < 20:
            sent = [connection.publish(grant["outbox"], b"flood %d" % number) for number in range(100)]
            reasons |= {one.result(10).value for one in sent}
        assert NOT_AUTHORIZED in reasons
        assert not connection.lost.is_set()
        connection.close()
    refusals = [
        (record.key.decode(), json.loads(record.value))
        for record, _ in folded(stack.settings, load_keyring(stack.settings))
        if b"request.refused" in record.header_values
    ]
    found = [body for stream, body in refusals if stream == "refused/http" and body["route"] == "MQTT"]
    assert [(one["principal"], one["reason"]) for one in found] == [("flooder", "rate_limited")]
    assert "paused there for 60 s" in found[0]["why"]


@pytest.mark.requirement("OP-05")
def test_a_gateway_that_does_not_answer_is_reported_once_and_not_killed(
    stack: LocalStack, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = stack["gateway"]
    assert gateway.pid is not None
    process, restarts = psutil.Process(gateway.pid), gateway.restarts

    def is_now(state: str) -> bool:
        began = time.monotonic()
        stack.look_after()
        assert time.monotonic() - began < 1.5, "supervising waits for nobody"
        return gateway.state == state

    process.suspend()
    try:
        wait_until(lambda: is_now("unresponsive"), 20, "the gateway is reported")
        status = {part.name: part for part in control.part_statuses(stack.settings)}["gateway"]
        assert (status.state, status.pid, status.why) == (
            "unresponsive",
            process.pid,
            "runs and does not answer",
        )
        for _ in range(5):
            stack.look_after()
    finally:
        process.resume()
    wait_until(lambda: is_now("ready"), 20, "the gateway is well again")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gateway ")]
    assert said == ["gateway does not answer; it is left running", "gateway answers again"]
    assert (gateway.pid, gateway.restarts) == (process.pid, restarts)


@pytest.mark.requirement("CM-05")
def test_the_parts_get_their_passwords_by_the_environment_and_nobody_else_sees_them(stack: LocalStack) -> None:
    roles = load_role_passwords(stack.settings)
    assert roles is not None
    secrets = {role: password.get_secret_value() for role, password in roles.items()}
    environment = psutil.Process(stack["bridge"].pid).environ()
    assert environment["TRUNKLINE__MQTT__USERNAME"] == "bridge"
    assert environment["TRUNKLINE__MQTT__PASSWORD"] == secrets["bridge"]
    keys = stack.settings.data_path / "keys"
    files = ("master.json", "mac-mqtt.json", "mqtt.json", "operator.token", "kafka.password")
    own = dict.fromkeys(files, 0o600) | {"commands": 0o700}
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == own
    texts = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    for folder in ("logs", "run", "mosquitto"):
        files = (path for path in (stack.settings.data_path / folder).rglob("*") if path.is_file())
        texts += [path.read_bytes().decode("utf-8", "replace") for path in files]
    token = stack.settings.operator_token_file.read_text().strip()
    assert not any(secret in text for text in texts for secret in (*secrets.values(), token))


def test_doctor_looks_at_accounts_gateway_and_token_of_a_running_stack(cli: Cli) -> None:
    assert cli("up", "--only", "kafka,mosquitto,gateway").returncode == 0
    answer = cli("doctor", "--json")
    checks = {check["check"]: check for check in json.loads(answer.stdout)["checks"]}
    assert answer.returncode == 0, answer.stdout
    assert {checks[name]["level"] for name in ("mqtt", "accounts", "gateway", "token", "ports")} == {"ok"}
    assert "/readyz answers, agent_mcp is open, dashboard is open" in checks["gateway"]["found"]
    assert (checks["xml_pump"]["level"], checks["xml_pump"]["mend"]) == ("warn", "start it: trunkline up")
    assert checks["views"]["level"] == "warn"
