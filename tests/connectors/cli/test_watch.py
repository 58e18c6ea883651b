"""`trunkline watch`: events on standard output, exit codes, over MQTT and over the gateway, on real brokers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.publish import single

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.tools.job_tools.job_files import store_secret
from schemas.settings.settings import Settings
from tests.broker_processes import BrokerProcess, ProgramProcess, wait_until
from tests.connectors.cli.conftest import CommandLine, read_line
from tests.mqtt_wire import publish_all
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import events_topic

JOB, OTHER, SECRET = "0a1b2c3d", "4e5f6a7b", "canary-90ff12-secret"


@pytest.fixture
def publisher(hub_settings: Settings, tmp_path: Path) -> Callable[..., None]:
    """Publishes an event of a job over MQTT, its secret stored; nobody waits for a receipt."""

    def publish(event: str, detail: str = "", job: str = JOB) -> None:
        store_secret(hub_settings, job, SECRET)
        outgoing = Job(job, SECRET, mqtt=hub_settings.mqtt, state_dir=tmp_path / "state")
        outgoing.publish(event, detail or event, wait_for_receipt=False)

    return publish


@pytest.fixture
def watching(
    trunkline: CommandLine, hub_settings: Settings, tmp_path: Path
) -> Callable[..., subprocess.Popen[str]]:
    """Starts a watch and waits until it misses nothing any more."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        ready = tmp_path / f"watch-{len(trunkline.started)}.ready"
        process = trunkline.start("watch", *arguments, TRUNKLINE_READY_FILE=str(ready))
        wait_until(lambda: ready.exists() or process.poll() is not None, what="the subscription")
        return process

    return start


def _ended(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


@pytest.mark.requirement("JE-20")
@pytest.mark.requirement("JE-21")
@pytest.mark.parametrize(("last", "code"), [("completed", 0), ("error", 1)])
def test_watch_prints_each_accepted_event_as_a_line_and_ends_as_the_job_ends(
    hub_settings: Settings, watching: Any, publisher: Any, last: str, code: int
) -> None:
    store_secret(hub_settings, JOB, SECRET)
    process = watching("--job", JOB)
    publisher("started")
    forged = {"schema_version": 1, "seq": 2, "job_id": JOB, "event": "completed", "detail": "believe me"}
    forged |= {"timestamp": "2026-11-21T10:00:00Z", "data": {}}
    topic = events_topic(hub_settings.mqtt.topic_prefix, JOB)
    single(
        topic,
        canonical(sign_event(forged, "no-secret")),
        qos=1,
        hostname="127.0.0.1",
        port=hub_settings.mqtt.port,
    )
    publisher("progress", "in the middle")
    publisher(last)
    returned, events, err = _ended(process)
    assert [event["event"] for event in events] == ["started", "progress", last]
    assert returned == code
    assert "bad_signature" in err
    assert SECRET not in err


@pytest.mark.requirement("JE-22")
def test_the_retained_end_is_enough_for_one_who_comes_late(watching: Any, publisher: Any) -> None:
    publisher("started")
    publisher("completed")
    code, events, _ = _ended(watching("--job", JOB, "--timeout", "20s"))
    assert (code, [event["event"] for event in events]) == (0, ["completed"])


@pytest.mark.requirement("JE-21")
def test_several_jobs_end_with_1_when_one_failed_and_with_2_when_the_time_ran_out(
    watching: Any, publisher: Any
) -> None:
    publisher("completed")
    publisher("started", job=OTHER)
    code, _, err = _ended(watching("--job", JOB, "--job", OTHER, "--timeout", "5s"))
    assert code == 2
    assert f"not ended: {OTHER}" in err
    code, _, err = _ended(watching("--job", JOB, "--job", OTHER, "--idle-timeout", "1s"))
    assert code == 2
    assert "no event for 1 s" in err
    publisher("error", job=OTHER)
    code, events, _ = _ended(watching("--job", JOB, "--job", OTHER))
    assert (code, {event["job_id"] for event in events}) == (1, {JOB, OTHER})


@pytest.mark.requirement("JE-22")
def test_a_broker_that_goes_and_comes_back_costs_no_event(
    hub_settings: Settings, watching: Any, publisher: Any, mosquitto_broker: BrokerProcess
) -> None:
    store_secret(hub_settings, JOB, SECRET)
    process = watching("--job", JOB)
    publisher("started")
    assert json.loads(read_line(process, "started"))["seq"] == 1
    for number in (1, 2):
        mosquitto_broker.stop()
        mosquitto_broker.start()
        # The broker keeps them for a subscriber that is not back yet.
        publisher("progress", f"after {number}")
    publisher("completed")
    code, events, err = _ended(process)
    assert [event["detail"] for event in events] == ["after 1", "after 2", "completed"]
    assert code == 0
    assert "trying again" in err
    assert "connected again" in err


@pytest.mark.requirement("JE-22")
def test_without_a_stored_secret_watch_says_so_and_points_to_settled(trunkline: CommandLine) -> None:
    done = trunkline.run("watch", "--job", JOB)
    # Not 2: a script must not take it for a time-out.
    assert (done.returncode, done.stdout) == (3, "")
    assert f"trunkline watch --job {JOB} --settled" in done.stderr
    for wrong in (
        ("watch",),
        ("watch", "--all", "--job", JOB),
        ("watch", "--job", "x"),
        ("watch", "--timeout", "x"),
    ):
        assert trunkline.run(*wrong).returncode == 2


@pytest.mark.requirement("JE-21")
def test_all_follows_what_begins_meanwhile_and_leaves_out_what_had_ended(
    hub_settings: Settings, watching: Any, publisher: Any
) -> None:
    publisher("error", job=OTHER)
    process = watching("--all", "--timeout", "30s")
    topic = events_topic(hub_settings.mqtt.topic_prefix, "ffffffff")
    single(topic, b"{}", qos=1, hostname="127.0.0.1", port=hub_settings.mqtt.port)
    publisher("started")
    publisher("completed")
    code, events, err = _ended(process)
    assert code == 0
    assert {event["job_id"] for event in events} == {JOB, OTHER}
    assert "ffffffff: its secret is not stored" in err


def _registered(hub: GatewayClient, settings: Settings, folder: Path) -> tuple[str, Job]:
    job = hub.post(path_of("jobs"), {"description": "x"})
    return job["job_id"], Job(job["job_id"], job["secret"], mqtt=settings.mqtt, state_dir=folder / "state")


@pytest.mark.requirement("JE-20")
@pytest.mark.requirement("JE-21")
def test_settled_follows_the_gateway_without_a_secret_and_sees_a_cancellation(
    hub: GatewayClient, hub_settings: Settings, watching: Any, tmp_path: Path, start_bridge: Any
) -> None:
    start_bridge(hub_settings)
    job, outgoing = _registered(hub, hub_settings, tmp_path)
    process = watching("--job", job, "--settled")
    outgoing.publish("started", "begins")
    outgoing.publish("progress", "wrote it")
    assert json.loads(read_line(process, "wrote it"))["seq"] == 2
    hub.post(path_of("jobs", job, "cancel"))
    code, events, err = _ended(process)
    assert (code, events) == (1, [])
    assert "cancelled" in err
    # A later watch sees at once that the job has ended.
    code, events, _ = _ended(watching("--job", job, "--settled"))
    assert (code, events) == (1, [])
    second, outgoing = _registered(hub, hub_settings, tmp_path)
    process = watching("--job", job, "--job", second, "--settled")
    outgoing.publish("completed", "done")
    code, events, _ = _ended(process)
    assert (code, [event["job_id"] for event in events]) == (1, [second])


@pytest.mark.requirement("JE-22")
@pytest.mark.requirement("JE-34")
def test_watch_ends_at_once_for_a_job_whose_retained_end_was_removed(
    hub: GatewayClient, hub_settings: Settings, watching: Any, tmp_path: Path, start_bridge: Any
) -> None:
    start_bridge(hub_settings)
    registered = hub.post(path_of("jobs"), {"description": "x"})
    job, secret = registered["job_id"], registered["secret"]
    store_secret(hub_settings, job, secret)
    Job(job, secret, mqtt=hub_settings.mqtt, state_dir=tmp_path / "state").publish("completed", "done")
    publish_all(hub_settings.mqtt, [(f"{job}/events", b"")], retain=True)
    code, events, err = _ended(watching("--job", job, "--timeout", "60s"))
    assert (code, events) == (0, [])
    assert "is completed" in err


@pytest.mark.requirement("JE-22")
@pytest.mark.parametrize("which", ["--job", "--all"])
def test_settled_goes_on_when_the_gateway_was_killed_and_started_again(
    which: str,
    gateway: ProgramProcess,
    next_gateway: Any,
    hub: GatewayClient,
    hub_settings: Settings,
    watching: Any,
    tmp_path: Path,
    start_bridge: Any,
) -> None:
    start_bridge(hub_settings)
    job, outgoing = _registered(hub, hub_settings, tmp_path)
    wanted = ["--job", job] if which == "--job" else ["--all"]
    process = watching(*wanted, "--settled", "--timeout", "60s")
    gateway.kill()
    outgoing.publish("completed", "while nobody looked")
    next_gateway()
    code, _, err = _ended(process)
    assert code == 0
    assert "trying again" in err


def test_settled_says_when_there_is_no_such_job_or_no_gateway(
    gateway: ProgramProcess, trunkline: CommandLine
) -> None:
    assert trunkline.run("watch", "--job", JOB, "--settled").returncode == 3
    gateway.stop()
    done = trunkline.run("watch", "--job", JOB, "--settled", TRUNKLINE_TOKEN="x")
    assert done.returncode == 5
    assert "trunkline up" in done.stderr


def test_ctrl_c_is_130(hub_settings: Settings, watching: Any, sent: Any) -> None:
    store_secret(hub_settings, JOB, SECRET)
    process = watching("--job", JOB)
    sent(process)
    assert _ended(process)[0] == 130
