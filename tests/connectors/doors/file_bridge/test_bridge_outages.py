"""Kafka or the gateway away, two bridges, and how long a message takes: the real bridge over real Kafka."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import httpx
import psutil
import pytest

from schemas.settings.settings import GatewaySettings
from tests.broker_processes import BrokerProcess, ProgramProcess, wait_until
from tests.connectors.doors.file_bridge.bridge_run import BridgeRun, lines_of
from tests.connectors.doors.http_api.hub_access import GatewayProcess
from tests.connectors.doors.http_api.hub_stack import MESSAGES

SESSIONS = ("default", "s1", "s2")
BOUND_S = 2.0
TIMES = 11


def _post(client: httpx.Client, recipient: str, number: int = 0) -> str:
    answer = client.post(MESSAGES, json={"recipient": recipient, "type": "note", "payload": {"n": number}})
    assert answer.is_success, answer.text
    return str(answer.json()["message_id"])


def _in_file(run: BridgeRun) -> list[str]:
    if not (run.session() / "messages.jsonl").exists():
        return []
    return [line["msg_id"] for line in lines_of(run.root)]


@pytest.mark.requirement("FQ-15")
@pytest.mark.timeout(180)
def test_while_kafka_is_away_lines_wait_the_bridge_says_so_without_spinning_and_then_each_counts_once(
    run: BridgeRun, kafka_broker: BrokerProcess
) -> None:
    sent: dict[str, set[str]] = {name: set() for name in SESSIONS}

    def send() -> None:
        for name, ids in sent.items():
            ids.update(
                run.queue.send("ask", str(number), to="bo", sender="ann", session=name) for number in range(10)
            )

    send()
    for name, ids in sent.items():
        run.wait_mailbox("bo", ids, name)
    with kafka_broker.away():
        began, process = time.monotonic(), psutil.Process(run.bridge.process.pid)
        used_s = sum(process.cpu_times()[:2])
        send()
        wait_until(lambda: len(run.says("waits")) >= 2, 60, "the bridge says that it waits")
        took_s = time.monotonic() - began
        assert sum(process.cpu_times()[:2]) - used_s < 0.5 * took_s + 1.0
        assert len(run.says("waits")) < 2 * took_s + 3
        assert all("Kafka" in one["why"] for one in run.says("waits"))
        # A kill in between forgets nothing.
        run.kill()
        said = len(run.says("waits"))
        send()
        run.bridge = run.started()
        wait_until(lambda: len(run.says("waits")) > said, 60, "the next one waits, too")
        assert run.bridge.process.poll() is None
        taken = [message["msg_id"] for message in run.queue.poll("bo", session="s2")]
        assert set(taken) == sent["s2"]
    run.bridge.wait_ready(60)
    for name, ids in sent.items():
        run.wait_mailbox("bo", ids, name, "claimed" if name == "s2" else "unread")
    accepted = {key[:2]: count for key, count in run.verdicts().items() if key[2] == "accepted"}
    assert accepted == {(f"mailbox/{name}/bo", one): 1 for name, ids in sent.items() for one in ids}


@pytest.mark.requirement("FQ-17")
@pytest.mark.requirement("FQ-15")
@pytest.mark.timeout(120)
def test_a_message_is_on_the_other_side_within_two_seconds_once_in_both_directions(run: BridgeRun) -> None:
    run.principal("bob").close()
    assert run.queue.poll("bob") == []
    run.wait_look()
    into_file, into_mailbox = [], []
    for number in range(TIMES):
        message_id = _post(run.operator, "bob", number)
        began = time.monotonic()
        wait_until(lambda message_id=message_id: message_id in _in_file(run), 20, "it is in the file")
        into_file.append(time.monotonic() - began)
    for number in range(TIMES):
        message_id = run.queue.send("ask", str(number), to="operator", sender="bob")
        began = time.monotonic()
        wait_until(
            lambda message_id=message_id: message_id in run.mailbox("operator"), 20, "it is in the mailbox"
        )
        into_mailbox.append(time.monotonic() - began)
    assert statistics.median(into_file) < BOUND_S
    assert statistics.median(into_mailbox) < BOUND_S
    run.wait_look()
    assert len(_in_file(run)) == len(set(_in_file(run))) == 2 * TIMES
    assert {key[2] for key in run.verdicts()} == {"accepted"}
    assert set(run.verdicts().values()) == {1}


@pytest.mark.requirement("FQ-17")
@pytest.mark.timeout(180)
def test_what_is_sent_while_the_gateway_is_away_comes_when_it_is_back_once(
    run: BridgeRun, tmp_path: Path
) -> None:
    run.principal("bob").close()
    assert run.queue.poll("bob") == []
    taken = _post(run.operator, "bob")
    wait_until(lambda: _in_file(run) == [taken], 20, "the first is in the file")
    run.queue.poll("bob")
    run.wait_mailbox("bob", {taken}, status="claimed")
    pending = _post(run.operator, "bob")
    wait_until(lambda: _in_file(run) == [taken, pending], 20, "the second is in the file")
    other = GatewayProcess(run.settings.model_copy(update={"gateway": GatewaySettings()}), tmp_path)
    try:
        other.program.wait_ready()
        run.gateway.program.kill()
        wait_until(lambda: run.says("gateway_away"), 20, "the bridge says that the gateway is away")
        with other.client() as client:
            missed = [_post(client, "bob", number) for number in range(5)]
        # The other way goes on.
        line = run.queue.send("ask", "still there?", to="operator", sender="bob")
        wait_until(
            lambda: run.verdicts()["mailbox/default/operator", line, "accepted"] == 1, 20, "it is carried"
        )
        # Half of what it is to find, it finds as a new one.
        run.kill()
        run.bridge = run.started()
        run.bridge.wait_ready()
    finally:
        other.program.stop()
    run.gateway.program = ProgramProcess("connectors.programs.gateway_program", run.settings, tmp_path, "again")
    run.gateway.program.wait_ready()
    wait_until(lambda: set(missed) <= set(_in_file(run)), 30, "what was missed is in the file")
    last = _post(run.operator, "bob")
    wait_until(lambda: last in _in_file(run), 20, "the stream stands")
    assert sorted(_in_file(run)) == sorted([taken, pending, line, *missed, last])
    assert {key[2] for key in run.verdicts()} == {"accepted"}
    assert set(run.verdicts().values()) == {1}


@pytest.mark.requirement("FQ-15")
@pytest.mark.requirement("FQ-17")
def test_a_second_bridge_waits_until_the_first_has_ended(run: BridgeRun, tmp_path: Path) -> None:
    run.principal("bob").close()
    run.queue.poll("bob")
    first = run.bridge
    second = ProgramProcess("connectors.doors.file_bridge", run.settings, tmp_path, "second")
    try:
        wait_until(lambda: '"standby"' in second.log(), 20, "the second says that it waits")
        sent = run.queue.send("ask", "x", to="bo", sender="ann")
        run.wait_mailbox("bo", {sent})
        ids = [_post(run.operator, "bob")]
        wait_until(lambda: ids[0] in _in_file(run), 20, "it is in the file")
        assert not second.ready_file.exists()
        run.kill()
        ids.append(_post(run.operator, "bob"))
        second.wait_ready()
        wait_until(lambda: ids[1] in _in_file(run), 20, "it is in the file")
        assert sorted(_in_file(run)) == sorted([sent, *ids])
        assert set(run.verdicts().values()) == {1}
        assert first.process.poll() is not None
    finally:
        second.stop()


@pytest.mark.requirement("FQ-15")
def test_a_lock_that_is_a_link_is_refused_and_what_it_points_to_stays(run: BridgeRun, tmp_path: Path) -> None:
    run.kill()
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (run.root / ".bridge.lock").unlink()
    (run.root / ".bridge.lock").symlink_to(precious)
    run.bridge = run.started()
    assert run.bridge.process.wait(30) == 1
    assert run.says("refused_to_start")
    assert precious.read_text() == "keep me"


@pytest.mark.requirement("FQ-15")
def test_a_bridge_that_starts_without_a_gateway_still_serves_the_agents_it_knew(run: BridgeRun) -> None:
    agents = run.operator.get("/api/hub/agents").json()["agents"]
    name = next(agent["name"] for agent in agents if agent["status"] == "defined")
    first = run.queue.send("broadcast", "one", sender="ann")
    run.wait_mailbox(name, {first})
    # It knows whom it has noted: killed before that, it waits for the gateway to tell it again.
    wait_until(lambda: name in run.noted_served(), 20, "the agent is noted")
    run.gateway.program.process.kill()
    run.kill()
    run.start()
    second = run.queue.send("broadcast", "two", sender="ann")
    for sent in (first, second):
        wait_until(
            lambda sent=sent: run.verdicts()[f"mailbox/default/{name}", sent, "accepted"] == 1,
            20,
            "it is posted",
        )
