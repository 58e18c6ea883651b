"""`trunkline publish --http` and its publisher, at a real gateway (DL-08).

The conformance kit checks that lost answers and kills repeat the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.local_stack import free_port
from schemas.settings.settings import Settings
from tests.broker_processes import ProgramProcess
from tests.connectors.agent_sdk.small_server import always, answer, serving
from tests.connectors.cli.conftest import CommandLine, json_of
from tests.raw_records import read_to_end
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import BackboneUnreachable, EventRejected, TrunklineError
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.ids import content_id

WORKER = "builder"
WHY_KEPT = r"is not that of a Trunkline gateway|stays in the outbox"


class Worker:
    """A worker with a token and a job, and what it needs to publish."""

    def __init__(self, hub: GatewayClient, settings: Settings, folder: Path) -> None:
        self.settings, self.hub, self.state_dir = settings, hub, folder / "state"
        told = hub.post(path_of("principals"), {"principal": WORKER, "role": "worker"})
        self.token = str(told["token"])
        job = hub.post(path_of("jobs"), {"description": "build", "session": WORKER})
        self.job_id, self.secret = str(job["job_id"]), str(job["secret"])
        self.client = GatewayClient(settings, token=self.token)
        self.client.post(path_of("jobs", "pick"), {"session": WORKER})
        self.command = ("publish", "--http", "--job", self.job_id, "--state-dir", str(self.state_dir))
        self.environment = {"TRUNKLINE_JOB_SECRET": self.secret, "TRUNKLINE_TOKEN": self.token}

    def publisher(self, url: str | None = None, **limits: int) -> Job:
        """A publisher of the job over HTTP."""
        access = HubAccess(url or self.settings.gateway_url, self.token)
        return Job(self.job_id, self.secret, hub=access, state_dir=self.state_dir, patience_s=4, **limits)

    def row(self) -> dict[str, Any]:
        """The job as the operator sees it."""
        return dict(self.hub.get(path_of("jobs", self.job_id)))

    def state(self) -> dict[str, Any]:
        """The outbox on disk."""
        return dict(json.loads((self.state_dir / f"{self.job_id}.json").read_text()))

    def logged(self) -> list[bytes]:
        """The bytes of the job's events in the log, in its order."""
        key, found = f"job/{self.job_id}".encode(), []
        for record in read_to_end(self.settings.kafka):
            if record.key == key and dict(record.headers)["ce_type"] == b"job.event":
                found.append(bytes(record.value))
        return found


@pytest.fixture
def worker(hub: GatewayClient, hub_settings: Settings, tmp_path: Path) -> Iterator[Worker]:
    """A worker whose job is picked."""
    found = Worker(hub, hub_settings, tmp_path)
    yield found
    found.client.close()


@pytest.mark.requirement("DL-08")
def test_publish_over_http_prints_the_receipt_with_the_verdict(worker: Worker, trunkline: CommandLine) -> None:
    def publish(*arguments: str, stdin: str | None = None) -> Any:
        return trunkline.run(*worker.command, *arguments, stdin=stdin, **worker.environment)

    done = publish("--event", "started", "--detail", "begins")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{worker.job_id}: started has seq 1, in the log at partition " in done.stdout
    assert done.stdout.endswith(", accepted\n")
    told = json_of(publish("--event", "progress", "--data", "-", "--json", stdin='{"done": 3}'))
    event = worker.logged()[1]
    assert len(told.pop("position")) == 2
    assert told == {
        "job_id": worker.job_id,
        "seq": 2,
        "ce_id": content_id(f"job/{worker.job_id}".encode(), event),
        "verdict": "accepted",
        "reason": None,
    }
    assert json.loads(event)["data"]["done"] == 3
    assert json_of(publish("--resend", "--json")) == {"job_id": worker.job_id, "resent": 0}
    done = publish("--event", "completed", "--detail", "all green")
    assert done.returncode == 0
    assert (worker.row()["status"], worker.row()["events"]) == ("completed", 3)
    after = publish("--event", "progress")
    assert (after.returncode, "has ended with seq 3" in after.stderr) == (2, True)
    assert worker.state()["outbox"] == []


@pytest.mark.requirement("DL-08")
def test_a_rejected_event_ends_publish_with_4_and_the_reason_and_does_not_block_the_next(
    worker: Worker, trunkline: CommandLine
) -> None:
    forged = worker.environment | {"TRUNKLINE_JOB_SECRET": "another-secret"}
    for arguments in (("--json",), ()):
        done = trunkline.call(*worker.command, "--event", "progress", *arguments, **forged)
        assert (done.returncode, done.stdout) == (4, "")
        assert "was rejected: bad_signature" in done.stderr
        assert worker.state()["outbox"] == []
    assert trunkline.call(*worker.command, "--event", "progress", **worker.environment).returncode == 0
    # Rejected events are not sent again, and their seq is not used twice.
    assert [json.loads(value)["seq"] for value in worker.logged()] == [1, 2, 3]
    assert (worker.row()["events"], worker.row()["last_seq"]) == (1, 3)
    unknown = ("publish", "--http", "--job", "00000000", "--state-dir", str(worker.state_dir))
    operator = {**worker.environment, "TRUNKLINE_TOKEN": ""}
    done = trunkline.call(*unknown, "--event", "progress", **operator)
    assert (done.returncode, "was rejected: unknown_stream" in done.stderr) == (4, True)


@pytest.mark.requirement("DL-08")
def test_a_refused_token_ends_publish_with_4_and_the_event_stays_in_the_outbox(
    worker: Worker, trunkline: CommandLine, hub: GatewayClient
) -> None:
    stranger = hub.post(path_of("principals"), {"principal": "stranger", "role": "worker"})["token"]
    sent = ("--event", "started", "--detail", "begins")
    for number, (token, why) in enumerate((("no-such-token" * 3, "unauthorized"), (stranger, "policy")), 1):
        arguments = sent if number == 1 else ("--event", "progress")
        done = trunkline.call(*worker.command, *arguments, **worker.environment | {"TRUNKLINE_TOKEN": token})
        assert (done.returncode, done.stdout) == (4, "")
        assert why in done.stderr
        assert "Event 1 stays in the outbox and is sent first at the next publish" in done.stderr
        assert worker.secret not in done.stderr and token not in done.stderr
        assert [one["seq"] for one in worker.state()["outbox"]] == list(range(1, number + 1))
    waiting = [one["payload"].encode() for one in worker.state()["outbox"]]
    done = trunkline.call(*worker.command, "--resend", **worker.environment)
    assert (done.returncode, done.stdout) == (0, "2 resent\n")
    assert worker.logged() == waiting
    hub.post(path_of("principals", WORKER, "revoke"))
    done = trunkline.call(*worker.command, "--event", "progress", **worker.environment)
    assert (done.returncode, "unauthorized" in done.stderr) == (4, True)


@pytest.mark.requirement("DL-08")
def test_without_a_gateway_publish_ends_with_5_and_sends_the_same_bytes_later(
    worker: Worker,
    trunkline: CommandLine,
    gateway: ProgramProcess,
    next_gateway: Any,
    hub_settings: Settings,
) -> None:
    gateway.kill()
    done = trunkline.call(*worker.command, "--event", "started", **worker.environment)
    assert (done.returncode, done.stdout) == (5, "")
    assert f"the hub at {hub_settings.gateway_url} does not answer" in done.stderr
    assert "Event 1 stays in the outbox" in done.stderr
    (waiting,) = [one["payload"].encode() for one in worker.state()["outbox"]]
    next_gateway()
    told = json_of(trunkline.call(*worker.command, "--event", "completed", "--json", **worker.environment))
    assert (told["seq"], told["verdict"]) == (2, "accepted")
    assert worker.logged()[0] == waiting
    assert [json.loads(value)["seq"] for value in worker.logged()] == [1, 2]
    assert worker.row()["status"] == "completed"


@pytest.mark.requirement("DL-08")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--event", "progress", "--no-receipt"), "--no-receipt and --attempts are for MQTT"),
        (("--event", "progress", "--attempts", "2"), "--no-receipt and --attempts are for MQTT"),
        (("--event", "progress", "--detail", "in /etc/x"), "posix_path"),
        (("--event", "progress", "--data", "{"), "--data: not JSON"),
        ((), "give --event"),
    ],
)
def test_a_wrong_call_with_http_ends_with_2_and_sends_nothing(
    backbone_settings: Settings, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    found = CommandLine(backbone_settings)
    command = ("publish", "--http", "--job", "0a1b2c3d", "--state-dir", str(tmp_path / "state"), *arguments)
    done = found.call(*command, TRUNKLINE_JOB_SECRET="s", TRUNKLINE_TOKEN="t" * 40)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.requirement("DL-08")
def test_an_event_that_is_too_long_for_the_gateway_is_rejected_and_does_not_block_the_next(
    worker: Worker,
) -> None:
    own = worker.settings.limits.payload_bytes
    publisher = worker.publisher(payload_bytes=2 * own)
    with pytest.raises(EventRejected, match="seq 1 was rejected: too_large") as caught:
        publisher.publish("progress", "", {"text": "x" * own})
    assert (caught.value.receipt.verdict, caught.value.receipt.position) == ("rejected", None)
    assert publisher.publish("progress", "short").seq == 2
    assert [json.loads(value)["seq"] for value in worker.logged()] == [2]


@pytest.mark.requirement("DL-08")
def test_an_event_in_the_outbox_is_signed_anew_after_a_rotation_of_the_secret(worker: Worker) -> None:
    with pytest.raises(BackboneUnreachable):
        worker.publisher(f"http://127.0.0.1:{free_port()}").publish("started", "begins")
    rotated = worker.hub.post(path_of("jobs", worker.job_id, "secret"), {"overlap_s": 0})
    worker.secret = str(rotated["secret"])
    assert worker.publisher().publish("progress", "goes on").seq == 2
    assert (worker.row()["events"], worker.row()["last_seq"]) == (2, 2)


@pytest.mark.requirement("DL-08")
def test_what_answers_and_is_no_gateway_confirms_nothing(worker: Worker) -> None:
    answers = (
        answer(200, b"<html>welcome</html>"),
        answer(200, b"{}"),
        answer(200, b"[]"),
        answer(200, b'{"ce_id": "x", "seq": 1, "verdict": "accepted", "position": 3}'),
        answer(413, b"<html>too long</html>"),
        answer(404, b"not here"),
        answer(403, b'{"reason": "bad_signature", "message": "of a proxy"}'),
    )
    with serving(always(*answers)) as server:
        for _ in answers:
            with pytest.raises(TrunklineError, match=WHY_KEPT) as caught:
                worker.publisher(server.access.url).publish("progress", "x")
            assert not isinstance(caught.value, EventRejected)
            assert worker.state()["outbox"][0]["seq"] == 1
    waiting = [one["payload"].encode() for one in worker.state()["outbox"]]
    assert worker.publisher().resend() == len(waiting) == 7
    assert worker.logged() == waiting
