"""When something breaks: Kafka away, gateways killed, two at once, many pickers, secrets and logs."""

from __future__ import annotations

import json
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from schemas.log_access.event_topic import admin_client
from tests.broker_processes import LOOPBACK, ProgramProcess, wait_until, with_kafka
from tests.connectors.doors.http_api.hub_access import (
    JOBS,
    PRINCIPALS,
    SESSIONS,
    GatewayProcess,
    add_principal,
    register,
)
from tests.connectors.doors.http_api.hub_stack import MESSAGES

PICKERS, JOB_COUNT = 16, 60
# If each failed within the end of the one before, they would exceed the stack.
SENDS = 240
# At once: long before a request runs into its time-out, also on a busy machine.
SETTLE_S, AT_ONCE_S = 4.0, 2.5


def _impatient(settings):
    changed = settings.gateway.model_copy(update={"settle_timeout_s": SETTLE_S})
    return with_kafka(settings, delivery_timeout_s=2).model_copy(update={"gateway": changed})


def _took(call):
    begun = time.monotonic()
    return call(), time.monotonic() - begun


@pytest.mark.requirement("CM-03")
def test_while_kafka_is_away_changes_are_answered_503_at_once_reads_go_on_and_it_recovers(
    backbone_settings, start_gateway, kafka_broker
):
    gateway = start_gateway(_impatient(backbone_settings))
    with gateway.client() as operator:
        before = register(operator)
        with kafka_broker.away():
            wait_until(lambda: operator.get("/readyz").status_code == 503, what="not ready")
            for path, body in (
                (JOBS, {"description": "x"}),
                (f"{JOBS}/pick", {"session": "s"}),
                (f"{JOBS}/{before['job_id']}/cancel", {}),
                (SESSIONS, {"session": "s"}),
                (PRINCIPALS, {"principal": "ann", "role": "viewer"}),
            ):
                answer, seconds = _took(lambda path=path, body=body: operator.post(path, json=body))
                assert (answer.status_code, answer.json()["reason"]) == (503, "unreachable"), path
                assert int(answer.headers["Retry-After"]) >= 1
                assert seconds < AT_ONCE_S, (path, seconds)
            assert operator.get(f"{JOBS}/{before['job_id']}").json()["status"] == "pending"
            # Nobody can know whether a mailbox is empty.
            assert operator.get(MESSAGES).status_code == 503
            with operator.stream("GET", "/api/hub/events") as answer:
                assert next(answer.iter_lines())
            assert [operator.get(path).status_code for path in ("/healthz", "/metrics")] == [200, 200]
            with gateway.client("nobody") as stranger:
                assert stranger.get(JOBS).status_code == 401
        wait_until(lambda: operator.get("/readyz").status_code == 200, 30, "ready again")
        # It is ready when its live view is; its producer may still be in a pause.
        answer = wait_until(
            lambda: (found := operator.post(JOBS, json={"description": "x"})).status_code == 201 and found,
            30,
            "a new job",
        )
        after = answer.json()
        picked = operator.post(f"{JOBS}/pick", json={"session": "s"}).json()
        assert picked["job_id"] == before["job_id"] != after["job_id"]


@pytest.mark.requirement("CM-03")
def test_a_kafka_that_hangs_costs_a_bounded_wait_and_then_answers_at_once(
    backbone_settings, start_gateway, kafka_broker
):
    gateway = start_gateway(_impatient(backbone_settings))
    with gateway.client() as operator:
        register(operator)
        with kafka_broker.standing_still():
            answer, seconds = _took(lambda: operator.post(JOBS, json={"description": "x"}))
            assert answer.status_code == 503 and seconds < 2 * SETTLE_S, seconds
            answer, seconds = _took(lambda: operator.post(JOBS, json={"description": "x"}))
            assert answer.status_code == 503 and seconds < AT_ONCE_S, seconds
            assert _took(lambda: operator.get("/healthz"))[1] < 1
        wait_until(lambda: operator.post(JOBS, json={"description": "y"}).status_code == 201, 60, "a new job")


@pytest.mark.requirement("ST-98")
def test_hundreds_of_messages_of_one_sender_that_wait_when_kafka_hangs_are_each_answered_once(
    backbone_settings, start_gateway, kafka_broker
):
    gateway = start_gateway(_impatient(backbone_settings))
    body = b'{"recipient": "hub", "type": "note"}'
    with ExitStack() as opened, gateway.client() as operator:
        token = add_principal(operator, "ann", "worker")
        head = f"POST {MESSAGES} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        address = (LOOPBACK, gateway.settings.gateway.port)
        with kafka_broker.standing_still():
            asking = [opened.enter_context(socket.create_connection(address, 20)) for _ in range(SENDS)]
            for one in asking:
                one.sendall(head.encode() + body)
            for one in asking:
                answer = one.recv(65536)
                assert answer.startswith(b"HTTP/1.1 503 ") and answer.count(b"HTTP/1.1") == 1
            assert operator.get("/healthz").status_code == 200
        asked = {"recipient": "hub", "type": "note"}
        wait_until(lambda: operator.post(MESSAGES, json=asked).status_code == 200, 60, "a new message")


def test_a_gateway_that_is_killed_comes_back_with_all_that_it_answered(start_gateway):
    gateway = start_gateway()
    with gateway.client() as operator:
        token = add_principal(operator, "ann", "delegator")
        revoked = add_principal(operator, "bo", "viewer")
        operator.post(f"{PRINCIPALS}/bo/revoke", json={})
        jobs = [register(operator) for _ in range(3)]
        first = operator.post(f"{JOBS}/pick", json={"session": "s"}).json()
    operator_token = gateway.operator_token
    gateway.program.kill()
    gateway = start_gateway()
    assert gateway.operator_token == operator_token
    with gateway.client(token) as ann, gateway.client(revoked) as bo, gateway.client() as operator:
        assert {job["job_id"] for job in ann.get(JOBS).json()["jobs"]} == {job["job_id"] for job in jobs}
        assert bo.get(JOBS).status_code == 401
        assert operator.post(f"{JOBS}/pick", json={"session": "s"}).json() == first
        assert operator.post(f"{JOBS}/pick", json={"session": "t"}).json()["job_id"] == jobs[1]["job_id"]


@pytest.mark.requirement("JE-11")
def test_16_pickers_on_two_gateways_never_get_the_same_job(backbone_settings, tmp_path):
    # Both are started at once, so they also race for the operator's token file.
    gateways = [GatewayProcess(backbone_settings, tmp_path) for _ in range(2)]
    try:
        for gateway in gateways:
            gateway.wait_ready()
        with gateways[0].client() as operator, ThreadPoolExecutor(8) as pool:
            secrets = {
                job["job_id"]: job["secret"] for job in pool.map(lambda _: register(operator), range(JOB_COUNT))
            }
        won: list[tuple[str, str]] = []
        problems: list[str] = []
        lock = threading.Lock()

        def pick_all(number: int) -> None:
            with gateways[number % 2].client() as client:
                for turn in range(JOB_COUNT + 1):
                    answer = client.post(f"{JOBS}/pick", json={"session": f"s{number}-{turn}"})
                    with lock:
                        if answer.status_code == 200:
                            won.append((answer.json()["job_id"], answer.json()["secret"]))
                            continue
                        if answer.status_code != 404:
                            problems.append(answer.text)
                    if answer.status_code == 404:
                        return

        threads = [threading.Thread(target=pick_all, args=(number,)) for number in range(PICKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not problems
        assert sorted(job_id for job_id, _ in won) == sorted(secrets)
        assert dict(won) == secrets
    finally:
        for gateway in gateways:
            gateway.program.kill()


def test_one_session_that_asks_many_times_at_once_gets_one_job(operator, gateway):
    for _ in range(5):
        register(operator)

    together = threading.Barrier(16)

    def pick(_: int) -> str:
        with gateway.client() as client:
            client.get("/healthz")
            together.wait(30)
            return client.post(f"{JOBS}/pick", json={"session": "s"}).json()["job_id"]

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(pick, range(16)))) == 1
    assert operator.get(JOBS, params={"state": "running"}).json()["total"] == 1


@pytest.mark.requirement("CM-05")
def test_no_token_secret_or_password_is_in_the_log(gateway, operator):
    canaries = [gateway.operator_token, add_principal(operator, "ann", "delegator")]
    password = "canary-broker-password"
    with gateway.client(canaries[1]) as ann:
        job = register(ann, broker={"host": "h", "username": "u", "password": password})
        ann.get(JOBS, params={"session": "canary-query"})
        ann.get("/canary-path", headers={"Authorization": "Bearer canary-of-nobody"})
        ann.post(JOBS, content=b'{"canary-body', headers={"Content-Type": "application/json"})
        ann.get(f"{JOBS}/canary-id")
    operator.post(f"{JOBS}/pick", json={"session": "s"})
    canaries += [job["secret"], password, "canary"]
    assert gateway.program.stop() == 0
    log = gateway.program.log()
    assert log.count('"event": "request"') >= 6
    assert not [canary for canary in canaries if canary in log]


def test_a_port_that_is_taken_and_a_token_file_that_others_can_read_end_the_start(gateway, tmp_path):
    second = ProgramProcess("connectors.programs.gateway_program", gateway.settings, tmp_path, "second")
    assert second.process.wait(60) == 1
    assert "gateway.port" in second.log()
    gateway.settings.operator_token_file.chmod(0o644)
    third = ProgramProcess("connectors.programs.gateway_program", gateway.settings, tmp_path, "third")
    assert third.process.wait(60) == 2
    assert "chmod 600" in third.log()
    with pytest.raises(httpx.HTTPStatusError), gateway.client("x" * 43) as stranger:
        stranger.get(JOBS).raise_for_status()


def test_a_signal_ends_it_in_order_while_it_serves_and_while_it_starts(
    backbone_settings, tmp_path, start_gateway
):
    serving = start_gateway()
    assert serving.program.stop(signal.SIGINT) == 0
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        starting = GatewayProcess(with_kafka(backbone_settings, bootstrap_servers=address), tmp_path)
        mute.settimeout(30)
        with mute.accept()[0]:  # it is asking this Kafka, which will not answer
            assert starting.program.stop() == 0
    for gateway in (serving, starting):
        assert "Traceback" not in gateway.program.log()


def test_on_a_full_disk_requests_are_answered_and_refusals_recorded_and_only_log_lines_are_lost(
    gateway, operator, read_topic
):
    def limit_files(bytes_: int) -> None:
        resource.prlimit(gateway.program.process.pid, resource.RLIMIT_FSIZE, (bytes_, unlimited))

    _, unlimited = resource.prlimit(gateway.program.process.pid, resource.RLIMIT_FSIZE)
    limit_files(0)
    with gateway.client("") as stranger:
        assert stranger.get(JOBS).status_code == 401
    # The last one may be logged when the disk has room again.
    job = [register(operator) for _ in range(2)][-1]
    time.sleep(0.2)  # lines of requests are written together
    limit_files(unlimited)
    assert operator.get(f"{JOBS}/{job['job_id']}").status_code == 200
    # A request is logged behind its answer.
    wait_until(lambda: "log_lines_lost" in gateway.program.log(), what="the lines that were lost are counted")
    lines = [json.loads(line) for line in gateway.program.log().splitlines() if line]
    lost = next(number for number, line in enumerate(lines) if line["event"] == "log_lines_lost")
    # The refusal, its request, and the registration.
    assert lines[lost]["lines"] >= 3
    assert lines[lost + 1]["event"] == "request"
    wait_until(lambda: [r for r in read_topic() if r.key == b"refused/http"], what="the record of the refusal")


@pytest.mark.requirement("OP-10")
def test_readyz_says_within_ten_seconds_that_the_topic_was_deleted(gateway, backbone_settings):
    def says_so() -> bool:
        answer = httpx.get(f"{gateway.settings.gateway_url}/readyz")
        return answer.status_code == 503 and "topic of the log does not exist" in answer.json()["message"]

    assert httpx.get(f"{gateway.settings.gateway_url}/readyz").status_code == 200
    with admin_client(backbone_settings.kafka) as admin:
        admin.delete_topics([backbone_settings.kafka.topic])
    wait_until(says_so, 10, "nobody has written anything, and the gateway notices")
