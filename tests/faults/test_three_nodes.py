"""Three nodes of Kafka under load at each door: nodes lose their disks, have full ones, and are away."""

from __future__ import annotations

import resource
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from connectors.cli.doctor.brokers import check_kafka, check_replicas
from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.log.kafka_topic import controllers, replication
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, post_xml
from connectors.programs.local_stack import LocalStack, child_process, free_port
from schemas.settings.settings import GatewaySettings, KafkaSettings, MqttSettings, Settings
from tests.broker_processes import LOOPBACK, wait_until
from tests.connectors.doors.http_api.hub_access import settled_log
from tests.connectors.doors.mcp_tools.conftest import PARTICIPANTS, Agent
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body
from tests.faults.test_agreement import look_after
from tests.own_settings import stack_settings
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.jobs.job import Job
from trunkline_agent.queue import Queue
from trunkline_agent.wire.verdicts import ACCEPTED

pytestmark = [pytest.mark.kafka, pytest.mark.stack]

NODES = ("kafka", "kafka_2", "kafka_3")
PARTS = ("kafka", "mosquitto", "bridge", "files", "gateway")
MESSAGES = "/api/hub/messages"
DOCUMENT = (
    "<message xmlns='urn:trunkline:envelope:1'><calculate xmlns='urn:trunkline:sample:1'>"
    "<operation>add</operation><first>{}</first><second>7</second></calculate></message>"
)
SOON_S, AGAIN_S = 60.0, 0.2
PAUSE_S = 0.05


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The stack without its streams."""
    servers = ",".join(f"{LOOPBACK}:{free_port()}" for _ in NODES)
    kafka = KafkaSettings(bootstrap_servers=servers, replication_factor=3, partitions=3, delivery_timeout_s=5)
    settings = stack_settings(
        tmp_path_factory.mktemp("nodes") / "data",
        kafka=kafka,
        gateway=GatewaySettings(port=free_port(), settle_timeout_s=4),
        mqtt=MqttSettings(port=free_port(), backoff_base_s=0.1, backoff_max_s=0.5, receipt_timeout_s=4),
    )
    try:
        with LocalStack(settings, PARTS) as running:
            yield running
    finally:
        child_process.kill_marked(child_process.mark_of(settings.data_path, ""))


@pytest.fixture
def settings(stack: LocalStack) -> Iterator[Settings]:
    """The settings of a stack with all its nodes, before and after the test."""
    wait_for_copies(stack)
    yield stack.settings
    wait_for_copies(stack)


def wait_for_copies(stack: LocalStack) -> None:
    """Supervise the stack until each node has a copy of each partition, and votes."""

    def are_there() -> bool:
        look_after(stack, 0.2)
        try:
            kafka = stack.settings.kafka
            has_all = not replication(kafka).missing and controllers(kafka) == len(NODES)
            return has_all and all(stack[one].is_ready for one in NODES)
        except BackboneUnreachable:
            return False

    wait_until(are_there, SOON_S, "each node has each partition")


class Door(threading.Thread):
    """Sends through one door, each message again until it is acknowledged, and knows the ids of these.

    `send` sends the message with a number, the same one each time, and returns its id. It raises
    BackboneUnreachable when the door does not acknowledge it.
    """

    def __init__(self, name: str, send: Callable[[int], str]) -> None:
        super().__init__(name=name, daemon=True)
        self.send = send
        self.acknowledged: list[str] = []
        self.refusals = 0
        self.failure: BaseException | None = None
        self._ending = threading.Event()

    def run(self) -> None:
        """Send until the end."""
        number = 0
        try:
            while not self._ending.wait(PAUSE_S):
                number += 1
                self.acknowledged.append(self.sent(number))
        except BaseException as error:  # told to the test, which would not see it in a thread
            self.failure = error

    def sent(self, number: int) -> str:
        """Send one message until it is acknowledged."""
        deadline = time.monotonic() + 2 * SOON_S
        while True:
            try:
                return self.send(number)
            except BackboneUnreachable:
                self.refusals += 1
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_S)

    def end(self) -> None:
        """Send no further message, and wait for the last one."""
        self._ending.set()
        self.join(3 * SOON_S)
        assert self.failure is None, f"{self.name}: {self.failure}"


@pytest.fixture
def doors(settings: Settings, tmp_path: Path) -> Iterator[dict[str, Door]]:
    """A sender for each door, each with a prefix of its own for its keys."""
    own = tmp_path.name
    with GatewayClient(settings) as gateway, GatewayClient(settings) as xml:
        for name, role in (("fil", "worker"), ("rex", "worker")):
            gateway.post("/api/hub/principals", {"principal": f"{name}-{own}", "role": role})
        job = gateway.post("/api/hub/jobs", {"description": "goes on without a node"})
        agent = Agent(f"ann-{own}"[:64], tmp_path)
        gateway.post(PARTICIPANTS, {"agent_name": agent.name, "public_key": agent.public_key})
        publisher = Job(job["job_id"], job["secret"], mqtt=settings.mqtt, state_dir=tmp_path)
        events: list[int] = []
        with SignedCaller(agent, SimpleNamespace(mcp_url=settings.mcp_server_url)) as caller:  # type: ignore[arg-type]

            def by_http(number: int) -> str:
                body = {"recipient": f"rex-{own}", "type": "note", "payload": {"n": number}}
                return str(gateway.post(MESSAGES, body, request_id=f"{own}-{number}")["message_id"])

            def by_xml(number: int) -> str:
                document = DOCUMENT.format(number).encode()
                posted = post_xml(xml, document, request_id=f"{own}-xml-{number}")
                assert posted.huh is None, posted
                return posted.messages["calculator"]

            def by_mcp(number: int) -> str:
                call = {"targetAgentId": agent.name, "message": str(number), "idempotencyKey": f"k{number}"}
                answer = caller.post(call_body("send_to_agent", **call))
                if answer.status_code == 503:
                    raise BackboneUnreachable(answer.text)
                found = answer.json()["result"]["structuredContent"]
                if found.get("reason") == "unreachable":
                    raise BackboneUnreachable(answer.text)
                assert "messageId" in found, answer.text
                return str(found["messageId"])

            def by_mqtt(number: int) -> str:
                if number in events:
                    publisher.resend()
                else:
                    events.append(number)
                    publisher.publish("progress", f"step {number}")
                return f"{job['job_id']}:{number}"

            def by_file(number: int) -> str:
                queue = Queue(queue_root(settings))
                return queue.send("status", str(number), to=f"rex-{own}", sender=f"fil-{own}")

            # The gateway reads the listeners from its file when it is ready.
            document = DOCUMENT.format(0).encode()
            known = lambda: post_xml(xml, document, request_id=f"{own}-first").huh is None  # noqa: E731
            wait_until(known, SOON_S, "the gateway knows the listeners")
            senders = {"http": by_http, "xml": by_xml, "mcp": by_mcp, "mqtt": by_mqtt, "file": by_file}
            yield {name: Door(name, send) for name, send in senders.items()}


def accepted(settings: Settings) -> Counter[str]:
    """How often the fold accepted each message, and each event of a job, by its id."""
    found: Counter[str] = Counter()
    for one in settled_log(settings):
        if one.verdict == ACCEPTED and one.type == "message.posted":
            found[str(one.ce_id)] += 1
        elif one.verdict == ACCEPTED and one.type == "job.event":
            found[f"{one.stream.removeprefix('job/')}:{one.seq}"] += 1
    return found


def check_each_is_there_once(settings: Settings, doors: dict[str, Door]) -> None:
    """Check that each acknowledged message is in the log, and counts once."""
    ids = {name: set(door.acknowledged) for name, door in doors.items()}
    # The bridge carries what is in the file, later.
    wait_until(lambda: ids["file"] <= accepted(settings).keys(), SOON_S, "the file's messages are carried")
    found = accepted(settings)
    for name, wanted in ids.items():
        assert {one: found[one] for one in wanted if found[one] != 1} == {}, name


@pytest.mark.requirement("DP-07")
@pytest.mark.timeout(300)
def test_two_nodes_lose_their_disks_in_turn_under_load_and_nothing_that_was_acknowledged(
    stack: LocalStack, settings: Settings, doors: dict[str, Door]
) -> None:
    for door in doors.values():
        door.start()
    # The first one has begun the cluster, and every client has its address first.
    for node in ("kafka", "kafka_3"):
        look_after(stack, 2)
        before = {name: len(door.acknowledged) for name, door in doors.items()}
        stack[node].kill()
        shutil.rmtree(stack[node].plan.cwd)
        wait_for_copies(stack)
        for name, door in doors.items():
            assert len(door.acknowledged) > before[name] + 10, (name, door.refusals, door.failure)
    for door in doors.values():
        door.end()
    check_each_is_there_once(settings, doors)
    assert [check(settings).level for check in (check_kafka, check_replicas)] == ["ok", "ok"]


def sent_by_all(doors: dict[str, Door], number: int) -> None:
    """Send one message by each door at once, each until it is acknowledged."""
    with ThreadPoolExecutor(len(doors)) as pool:
        found = pool.map(lambda door: door.sent(number), doors.values())
        for door, one in zip(doors.values(), found, strict=True):
            door.acknowledged.append(one)


@pytest.mark.requirement("DP-08")
@pytest.mark.timeout(300)
def test_with_one_node_of_three_each_door_refuses_and_says_why_and_later_each_message_counts_once(
    stack: LocalStack, settings: Settings, doors: dict[str, Door]
) -> None:
    sent_by_all(doors, 1)
    away = NODES[1:]
    for node in away:
        stack[node].kill()
    try:
        with ThreadPoolExecutor(len(doors)) as pool:
            sent = {name: pool.submit(door.send, 2) for name, door in doors.items()}
        # The file has it. The bridge carries it later.
        doors["file"].acknowledged.append(sent.pop("file").result())
        for name, one in sent.items():
            assert isinstance(one.exception(), BackboneUnreachable), (name, one)
        with GatewayClient(settings) as gateway:
            assert gateway.get("/api/hub/jobs")["jobs"], "what is known can be read"
        found = check_kafka(settings)
        assert found.level == "fail" and "2 of the 3 brokers" in found.found, found
    finally:
        for node in away:
            stack[node].start()
    wait_for_copies(stack)
    sent_by_all(doors, 2)
    sent_by_all(doors, 3)
    check_each_is_there_once(settings, doors)


@pytest.mark.requirement("DP-07")
@pytest.mark.timeout(300)
def test_a_node_whose_disk_is_full_ends_and_the_others_go_on(
    stack: LocalStack, settings: Settings, doors: dict[str, Door]
) -> None:
    sent_by_all(doors, 1)
    pid = stack["kafka_2"].pid
    assert pid is not None
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    for number in range(2, 6):
        sent_by_all(doors, number)
    wait_until(lambda: stack["kafka_2"].pid is None, SOON_S, "the node without a disk has ended")
    sent_by_all(doors, 6)
    # It is started again, and has room.
    wait_for_copies(stack)
    assert stack["kafka_2"].restarts >= 1
    check_each_is_there_once(settings, doors)
