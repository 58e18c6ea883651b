"""kill -9 of each part under load: what was receipted is in the ledger, once."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from connectors.log.ledger_files.ledger_reader import LedgerReader
from connectors.programs.local_stack import LocalStack, free_port
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import AgentMcpSettings, DashboardSettings, KafkaSettings, MqttSettings, Settings
from tests.faults.receipted_load import Agent, Oracle, register_jobs
from tests.faults.test_agreement import look_after
from tests.own_settings import stack_settings

AGENTS = 6
EVENTS = 8
CAUGHT_UP_WITHIN_S = 60.0
VICTIMS = ("bridge", "gateway", "streams", "kafka", "mosquitto")


def own_settings(tmp_path: Path) -> Settings:
    """A stack of its own, with publishers that try again soon."""
    return stack_settings(
        tmp_path / "stack",
        kafka=KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}", delivery_timeout_s=10),
        mqtt=MqttSettings(port=free_port(), backoff_base_s=0.1, backoff_max_s=0.5, receipt_timeout_s=4),
        dashboard=DashboardSettings(port=0),
        agent_mcp=AgentMcpSettings(port=0),
    )


def all_ready(stack: LocalStack) -> bool:
    """True if every part is up again."""
    return all(part.state == "ready" for part in stack.parts.values())


def missing(settings: Settings, oracle: Oracle) -> set[tuple[str, int]]:
    """Return the events that have a receipt and are not accepted in the ledger."""
    return oracle.receipted() - set(accepted_events(settings))


def accepted_events(settings: Settings) -> Counter[tuple[str, int]]:
    """How often each event was accepted."""
    columns = ["stream_id", "seq", "verdict", "type"]
    _, table = LedgerReader(settings).rows(columns=columns)
    return Counter(
        (row["stream_id"], row["seq"])
        for row in table.to_pylist()
        if row["type"] == "job.event" and row["verdict"] == "accepted"
    )


def run_with_kills(tmp_path: Path, kills: list[str], jobs_per_agent: int, seed: int) -> None:
    """The load, the kills, and what must hold afterwards."""
    draw = random.Random(seed)
    settings = own_settings(tmp_path)
    oracle = Oracle(tmp_path / "oracle.jsonl")
    with LocalStack(settings) as stack:
        jobs = register_jobs(settings, load_keyring(settings), AGENTS * jobs_per_agent)
        agents = [
            Agent(settings, jobs[number::AGENTS], EVENTS, oracle, tmp_path / "agents")
            for number in range(AGENTS)
        ]
        for agent in agents:
            agent.start()
        for victim in kills:
            look_after(stack, draw.uniform(0.5, 3.0))
            stack[victim].kill()
        while any(agent.is_alive() for agent in agents) or not all_ready(stack):
            look_after(stack, 0.2)
        assert [agent.failure for agent in agents if agent.failure] == []
        last_restart = time.monotonic()
        while missing(settings, oracle) and time.monotonic() - last_restart < CAUGHT_UP_WITHIN_S:
            look_after(stack, 0.5)
        assert missing(settings, oracle) == set(), "receipted, and not in the ledger"
    accepted = accepted_events(settings)
    assert set(accepted.values()) == {1}, "accepted twice"
    assert oracle.receipted() == {(job.job_id, seq) for job in jobs for seq in range(1, EVENTS + 1)}
    assert_nothing_changes_after_the_end(settings)


def assert_nothing_changes_after_the_end(settings: Settings) -> None:
    """In the order of the log, no record of a job is accepted after its end."""
    _, table = LedgerReader(settings).rows(
        columns=["partition", "offset", "stream_id", "verdict", "status_after"]
    )
    ended: set[str] = set()
    for row in sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"])):
        assert not (row["stream_id"] in ended and row["verdict"] == "accepted"), row
        if row["status_after"] == "completed":
            ended.add(row["stream_id"])


@pytest.mark.slow
@pytest.mark.requirement("CM-03")
@pytest.mark.requirement("JE-18")
@pytest.mark.timeout(400)
def test_one_kill_of_each_part_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    run_with_kills(tmp_path, list(VICTIMS), jobs_per_agent=4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_kills_at_random_moments_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    draw = random.Random(20261122)
    kills = [draw.choice(VICTIMS) for _ in range(10)]
    run_with_kills(tmp_path, kills, jobs_per_agent=12, seed=2)
