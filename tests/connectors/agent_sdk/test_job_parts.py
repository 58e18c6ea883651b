"""Parts of a job that need no backbone: arguments, environment, outbox files, and the end of a wait."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_processes import wait_until
from trunkline_agent.broker import Broker, mqtt_broker
from trunkline_agent.credentials import Credentials, HubAccess, MqttAccess
from trunkline_agent.errors import BackboneUnreachable, UsageError
from trunkline_agent.jobs.async_job import AsyncJob
from trunkline_agent.jobs.deliveries import environment_broker, environment_doors
from trunkline_agent.jobs.job import Job, default_state_dir
from trunkline_agent.outbox.outbox import AgentOutbox, JobOutbox

JOB, SECRET = "0a1b2c3d", "canary-7c3e-secret"
GIVEN = {"TRUNKLINE_JOB_ID": JOB, "TRUNKLINE_JOB_SECRET": SECRET}


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.requirement("AG-22")
def test_an_outbox_of_the_version_before_is_read_and_goes_on(tmp_path: Path) -> None:
    # Written by the publisher that was no library yet.
    payload = json.dumps({"seq": 3, "detail": "größer"}, ensure_ascii=False)
    old = {"job_id": JOB, "last_seq": 3, "ended_seq": 3}
    old |= {"outbox": [{"seq": 3, "payload": payload, "event": "completed"}]}
    (tmp_path / f"{JOB}.json").write_text(json.dumps(old))
    with JobOutbox(tmp_path, JOB, 1) as outbox:
        assert (outbox.last_seq, outbox.ended_seq) == (3, 3)
        (pending,) = outbox.pending
        assert (pending.wire_bytes, pending.event, pending.is_terminal) == (payload.encode(), "completed", True)
        outbox.confirm(pending)
    with JobOutbox(tmp_path, JOB, 1) as outbox:
        assert (outbox.pending, outbox.ended_seq) == ((), 3)
    digest = hashlib.sha256(b"secret").hexdigest()
    mail = {"agent_name": "ann", "secret_sha256": digest, "last_seq": 7, "outbox": [{"seq": 7, "payload": "x"}]}
    (tmp_path / "ann.json").write_text(json.dumps(mail))
    with AgentOutbox(tmp_path, "ann", "secret", 1) as agents:
        assert [(one.seq, one.wire_bytes) for one in agents.pending] == [(7, b"x")]
        assert agents.add(lambda seq: b"%d" % seq).seq == 8


@pytest.mark.requirement("AG-26")
@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"TRUNKLINE_HUB_URL": "http://h:1", "TRUNKLINE_AGENT_TOKEN": "t"}, "hub"),
        ({"TRUNKLINE_HUB_URL": "http://h:1", "TRUNKLINE_AGENT_TOKEN": "t", "MQTT_BROKER": "b"}, "hub"),
        ({"MQTT_BROKER": "b"}, "mqtt"),
    ],
)
def test_the_environment_names_the_way_of_a_job(variables: dict[str, str], kind: str) -> None:
    assert list(environment_doors(variables)) == [kind]


@pytest.mark.requirement("AG-26")
def test_a_broker_of_the_environment_has_port_tls_and_login(tmp_path: Path) -> None:
    variables = {"MQTT_BROKER": "b", "MQTT_PORT": "8883", "MQTT_TLS": "True", "MQTT_CA_CERTS": "ca.pem"}
    login = {"MQTT_USERNAME": "ann", "MQTT_PASSWORD": SECRET}
    found = environment_broker(variables | login)
    assert found == Broker("b", 8883, True, Path("ca.pem"), username="ann", password=SECRET)
    assert SECRET not in repr(found)
    assert environment_broker({"MQTT_BROKER": "b"}) == Broker("b")
    access = MqttAccess("b", 8883, True, "agents", "s")
    credentials = Credentials("ann", mqtt=access, ca_certs=str(tmp_path))
    assert mqtt_broker(access, credentials.ca_certs) == Broker("b", 8883, True, tmp_path)


@pytest.mark.requirement("AG-26")
@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "TRUNKLINE_JOB_ID and TRUNKLINE_JOB_SECRET"),
        ({"TRUNKLINE_JOB_ID": JOB}, "TRUNKLINE_JOB_SECRET not set"),
        ({"TRUNKLINE_JOB_ID": JOB, "TRUNKLINE_JOB_SECRET": SECRET}, "no way to send events"),
        ({"TRUNKLINE_JOB_ID": "x", "TRUNKLINE_JOB_SECRET": SECRET, "MQTT_BROKER": "b"}, "not a job id"),
        (
            {"TRUNKLINE_JOB_ID": JOB, "TRUNKLINE_JOB_SECRET": SECRET, "MQTT_BROKER": "b", "MQTT_PORT": "x"},
            "port",
        ),
        ({"TRUNKLINE_JOB_ID": JOB, "TRUNKLINE_JOB_SECRET": SECRET, "MQTT_BROKER": "b", "MQTT_TLS": "x"}, "TLS"),
    ],
)
def test_an_environment_without_a_job_is_a_clear_error(variables: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        Job.from_environment(variables)
    assert SECRET not in str(caught.value)


@pytest.mark.requirement("AG-26")
def test_the_folder_of_the_outboxes_is_that_of_the_environment_or_in_the_home() -> None:
    assert default_state_dir({"TRUNKLINE_STATE_DIR": "here"}) == Path("here")
    assert default_state_dir({"XDG_STATE_HOME": "there"}) == Path("there/trunkline-agent")
    assert default_state_dir({}) == Path.home() / ".local/state/trunkline-agent"


@pytest.mark.requirement("AG-20")
def test_a_job_without_a_way_is_refused_and_shows_no_secret() -> None:
    with pytest.raises(UsageError, match="give hub or mqtt"):
        Job(JOB, SECRET)
    with pytest.raises(UsageError, match="no section 'hub'"):
        Job(JOB, SECRET, hub=Credentials("ann"))
    assert SECRET not in repr(Job(JOB, SECRET, mqtt=Broker()))


@pytest.mark.requirement("AG-23")
@pytest.mark.parametrize("door", ["http", "mqtt"])
def test_a_cancelled_call_of_an_async_job_ends_at_once_and_keeps_the_event(
    door: str, silent_port: int, tmp_path: Path
) -> None:
    way = {"hub": HubAccess(f"http://127.0.0.1:{silent_port}", "t")}
    if door == "mqtt":
        way = {"mqtt": Broker(port=silent_port, connect_timeout_s=60)}  # type: ignore[dict-item]
    job = AsyncJob(JOB, SECRET, state_dir=tmp_path, **way)  # type: ignore[arg-type]
    file = tmp_path / f"{JOB}.json"

    async def cancelled() -> None:
        call = asyncio.create_task(job.started())
        while not file.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    begun = time.monotonic()
    asyncio.run(cancelled())
    # Its thread ends, too, and so it holds the outbox no longer.
    wait_until(lambda: f"job {JOB}" not in {one.name for one in threading.enumerate()}, 5, "the thread ends")
    assert time.monotonic() - begun < 5
    with JobOutbox(tmp_path, JOB, 0.1) as outbox:
        assert [one.event for one in outbox.pending] == ["started"]


@pytest.mark.requirement("AG-20")
def test_an_event_that_the_hub_does_not_answer_stays_in_the_outbox(silent_port: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    job = Job(JOB, SECRET, hub=HubAccess(f"http://127.0.0.1:{port}"), state_dir=tmp_path, patience_s=0.3)
    begun = time.monotonic()
    with pytest.raises(BackboneUnreachable, match="Event 1 stays in the outbox") as caught:
        job.started()
    assert time.monotonic() - begun < 5
    assert SECRET not in str(caught.value)
    with JobOutbox(tmp_path, JOB, 0.1) as outbox:
        assert len(outbox.pending) == 1
