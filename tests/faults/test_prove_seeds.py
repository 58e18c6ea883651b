"""`./trunkline prove`: a seed is run and finds nothing, a planted bug is found, an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.settings.settings import PROJECT_ROOT
from tests.broker_processes import wait_until
from tests.faults.prove.brokers import Brokers
from tests.faults.prove.comparison import LOST
from tests.faults.prove.schedule import CRASH, KILL, SECOND, Injection, draw_schedule
from tests.faults.prove.seed_run import LIMIT_S, SeedRun

pytestmark = pytest.mark.kafka

# Named points in a settling task and in a gateway, a killed broker, one file bridge too many, slow readers of
# large messages. After a change of the decks, choose a new seed with such faults.
CI_SEED = 251767
DRAWN = {
    *("crash:streams.after_file", "crash:gateway.reactor_appended"),
    *("kill:kafka", "second:files", "slow_read:events"),
}
CI_LOAD_S = 9.0


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    """Kafka and Mosquitto behind proxies of their own."""
    with Brokers(tmp_path / "brokers") as found:
        yield found


@pytest.mark.slow
@pytest.mark.requirement("CM-03")
@pytest.mark.timeout(450)
def test_a_seed_of_faults_at_all_doors_loses_doubles_and_changes_nothing(
    brokers: Brokers, tmp_path: Path
) -> None:
    drawn = draw_schedule(CI_SEED)
    assert set(drawn.faults) >= DRAWN
    sooner = CI_LOAD_S / drawn.load_s
    early = tuple(dataclasses.replace(one, at_s=one.at_s * sooner) for one in drawn.injections)
    schedule = dataclasses.replace(drawn, load_s=CI_LOAD_S, injections=early)
    folder = tmp_path / "seed"
    folder.mkdir()
    # A seed has a hundred seconds of a machine to itself; this one may run beside other tests.
    result = SeedRun(schedule, folder, brokers, limit_s=2 * LIMIT_S).run()
    assert result.findings == []
    assert set(result.by_door) == {"http", "file", "mcp", "mqtt", "xml"}
    assert result.acknowledged > 50
    # A named point may not be reached, and a second one may end because Kafka is away; all else is done.
    certain = {one.fault for one in schedule.injections if one.kind not in (CRASH, SECOND)}
    assert certain <= set(result.faults)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gateway_that_acknowledges_before_kafka_has_it_is_found(brokers: Brokers, tmp_path: Path) -> None:
    kills = tuple(Injection(f"{KILL}:gateway", at_s) for at_s in (3.0, 9.0))
    schedule = dataclasses.replace(draw_schedule(1), injections=kills)
    folder = tmp_path / "seed"
    folder.mkdir()
    replaced = {"gateway": "tests.faults.prove.acks_too_early"}
    result = SeedRun(schedule, folder, brokers, replaced).run()
    lost = [finding["what"] for finding in result.findings if finding["kind"] == LOST]
    assert any("is in no accepted row" in what for what in lost), result.findings[:5]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_run_ends_cleanly_loses_no_finished_seed_and_goes_on(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "connectors.cli", "prove", "--seeds", "2", "--results", str(results)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment, start_new_session=True)
    try:
        wait_until(lambda: results.exists() and results.read_text().endswith("\n"), 200, "the first seed")
        first = results.read_text()
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(60) == 130
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert results.read_text() == first
    assert list(tmp_path.glob("trunkline-prove-*/kafka")) == []
    done = subprocess.run(
        [*command, "--json"], cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["seeds"], found["lost"]) == (0, 2, 0), done.stderr
    assert results.read_text().startswith(first)
