"""A launch in which Kafka stops to answer (HH-05): it goes on from there, and starts nothing twice."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.hub.launcher.launch_spec import read_launchers
from connectors.hub.launcher.local_processes import LocalProcessLauncher, stop_all
from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowLists
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.log_appender import LogAppender
from connectors.hub.services.mailboxes import MailboxIndex
from connectors.hub.services.task_keeper import TaskKeeper, container_of
from connectors.hub.serving.identities import task_token
from schemas.fold import stream_kind as states
from schemas.keys.sealing import Keyring, load_keyring
from schemas.settings.settings import Settings
from schemas.streams.agents.agent_registry import REGISTRY_PARTICIPANTS
from schemas.streams.container.containers import (
    CONFIGURING,
    CONTAINER_CHANGED,
    MONITORING,
    PROVISIONING,
    RECYCLED,
    RECYCLING,
    REGISTRY_CONTAINERS,
    STARTING,
)
from schemas.streams.mailboxes.message import MessageRow
from schemas.streams.principal.principals import token_hash
from schemas.streams.task.task_registry import REGISTRY_TASKS, TaskCompletion, TaskStart
from tests.broker_processes import BrokerProcess, stand_still, wait_until
from tests.connectors.doors.http_api.hub_stack import hub_settings, processes_of
from trunkline_agent.wire.verdicts import ACCEPTED

SETTLE_S, AWAY_S = 1.5, 3.0
STEPS = [PROVISIONING, CONFIGURING, STARTING, states.RUNNING, MONITORING]


def _no_scan(row_type: type[Any]) -> list[Any]:
    raise AssertionError(f"all rows of the type {row_type.__name__} were read after the start")


class Launching:
    """The launching parts of a gateway, in this process. At the first step to `halt_at` Kafka stands still for
    `AWAY_S`.
    """

    def __init__(self, settings: Settings, kafka: psutil.Popen, halt_at: str, opened: ExitStack) -> None:
        self.keyring: Keyring = load_keyring(settings)
        self.view = LiveView(settings, self.keyring)
        self.settled: list[SettledRecord] = []
        self.view.on_settled(self.settled.extend)
        lists, mailboxes = RowLists(self.view), MailboxIndex()
        self.view.on_change(lists.changed)
        self.view.on_change(mailboxes.changed)
        opened.callback(self.view.close)
        self.view.open()
        lists.load()
        mailboxes.load(self.view.all(MessageRow))
        self.view.all = _no_scan  # type: ignore[method-assign]
        self.appender = LogAppender(settings, self.view)
        opened.callback(self.appender.close)
        self.appender.open()
        rules = read_launchers(settings.gateway.launchers_file)
        launcher = LocalProcessLauncher(settings, rules)
        opened.callback(stop_all, settings)
        self.halted = threading.Event()
        step = TaskKeeper._change
        here = self

        class Halting(TaskKeeper):
            def _change(self, task: Any, state: str, *more: Any, **named: Any) -> SettledRecord:
                if state == halt_at and not here.halted.is_set():
                    here.halted.set()
                    stand_still(kafka)
                    threading.Timer(AWAY_S, kafka.send_signal, [signal.SIGCONT]).start()
                return step(self, task, state, *more, **named)

        self.keeper = Halting(settings, self.keyring, self.view, lists, mailboxes, self.appender, launcher)
        opened.callback(self.keeper.close)
        self.keeper.open()

    def task(self, task_id: str) -> None:
        """Start one as the door of the hub does: a spawned agent."""
        start = TaskStart(
            task_id=task_id,
            request_id=task_id,
            description="waits",
            agent_name=f"agent-{task_id}",
            capabilities=[],
            token_sha256=token_hash(task_token(self.keyring, task_id, None)),
            expiry_ms=3_600_000,
            image="test/idle",
        )
        self.appender.settle_in_thread(start.record(door="http", principal="operator"))

    def state(self, task_id: str) -> str | None:
        """That of its container."""
        row: Any = self.view.row(REGISTRY_CONTAINERS, container_of(task_id))
        return None if row is None else str(row.state)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closed with the test, the last first."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.requirement("HH-05")
@pytest.mark.requirement("ST-71")
@pytest.mark.parametrize("halt_at", STEPS)
def test_a_launch_goes_on_when_kafka_is_back_and_its_agent_runs_once(
    kafka_broker: BrokerProcess, tmp_path: Path, opened: ExitStack, halt_at: str
) -> None:
    assert kafka_broker.process is not None
    settings = hub_settings(kafka_broker, tmp_path)
    gateway = settings.gateway.model_copy(update={"settle_timeout_s": SETTLE_S})
    settings = settings.model_copy(update={"gateway": gateway})
    task_id = f"task-{time.time_ns()}"
    here = Launching(settings, kafka_broker.process, halt_at, opened)
    here.task(task_id)
    assert here.halted.wait(20), "Kafka stood still"
    wait_until(lambda: here.state(task_id) == MONITORING, what="the agent is watched")
    task: Any = here.view.row(REGISTRY_TASKS, task_id)
    agent: Any = here.view.row(REGISTRY_PARTICIPANTS, f"agent-{task_id}")
    assert task.status == states.RUNNING and agent.status != "stopped"
    assert len(processes_of(task_id)) == 1
    done = TaskCompletion(task_id=task_id, request_id="done", result="waited")
    here.appender.settle_in_thread(done.record(door="http", principal="operator"))
    wait_until(lambda: here.state(task_id) == RECYCLED, what="all is cleared away")
    assert processes_of(task_id) == []
    taken = [
        one.status_after for one in here.settled if (one.type, one.verdict) == (CONTAINER_CHANGED, ACCEPTED)
    ]
    assert Counter(taken) == Counter([*STEPS, RECYCLING, RECYCLED]), "each step once"
