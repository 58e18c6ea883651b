"""The benchmark of a principal that floods: its arithmetic, options and processes, and one door for real."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.benchmarks.bench_report import not_held
from tests.benchmarks.calm_clients import Window
from tests.benchmarks.flood import AT_MOST, DOORS, Door, benchmark, figures, logged_during, refusals_in, rows_of
from tests.benchmarks.flooders import BURN, Flooded, Order, flooding

pytestmark = pytest.mark.requirement("LM-09")

IN_A_TURN = """
import multiprocessing, time
from schemas.settings.settings import Settings
from tests.benchmarks.flood import end_by_sigterm
from tests.benchmarks.flooders import BURN, Order, flooding
end_by_sigterm()
with flooding(Order(BURN, Settings(), BURN, "0.1")) as burner:
    burner.begin(60)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(60)
"""


def window(**took_ms: list[float]) -> Window:
    """A window with these round trips."""
    found = Window()
    found.took_ms.update(took_ms)
    found.health_ms = [1.0] * 99 + [max(took_ms["mqtt"])]
    return found


def door(calm_ms: float, flood_ms: float, control_ms: float, after_mb: float = 330.0) -> Door:
    """Measurements at a door in 40 s: one principal is as usual, and the other has these p99s."""
    usual = [10.0] * 100
    return Door(
        Order("http", Settings(), "loud", sink="sink"),
        calm=window(http=usual, mqtt=[calm_ms] * 50),
        flood=window(http=usual, mqtt=[flood_ms] * 50),
        control=window(http=usual, mqtt=[control_ms] * 50),
        turns=[Flooded({"200": 10, "429": 90}, 10.0, 5.0), Flooded({"429": 100}, 10.0, 5.0)],
        before_mb={"gateway": 300.0},
        after_mb={"gateway": after_mb},
        began_at=1000.0,
        ended_at=1040.0,
    )


def row(principal: str, stream: str, record_type: str, verdict: str, **more: Any) -> dict[str, Any]:
    """A row of the ledger."""
    found = {"principal": principal, "stream_id": stream, "type": record_type, "verdict": verdict}
    return {**found, "reason": None, "value": b"{}", **more}


def test_the_worst_ratio_is_that_of_the_principal_that_suffered_most() -> None:
    found = figures(door(20.0, 50.0, 25.0), {"message.posted accepted": 10}, 10)
    assert found["p99_ratio"] == {"http": 1.0, "mqtt": 2.5}
    assert (found["worst_ratio"], found["worst_control_ratio"]) == (2.5, 2.0)
    assert (found["healthz_p99_ms"]["flood"], found["healthz_delay_ms"]) == (50.0, 25.0)
    assert (found["sent_per_s"], found["flooder_cores"]) == (10, 0.5)
    assert found["answers"] == {"200": 10, "429": 190}


def test_memory_may_grow_by_a_fifth_and_by_the_records_that_were_added() -> None:
    def share(after_mb: float, records: int) -> float:
        return float(figures(door(20.0, 20.0, 20.0, after_mb), {}, records)["memory_share"])

    assert share(360.0, 0) == 1.0
    assert share(400.0, 0) > 1.1
    assert share(400.0, 10_000) == 1.0


def test_the_records_of_a_door_are_those_of_its_turns() -> None:
    rows = [{"logged_at": datetime.fromtimestamp(moment, UTC)} for moment in (999, 1000, 1039, 1041)]
    assert logged_during(rows, door(20.0, 20.0, 20.0)) == 2


def test_refusals_may_be_as_many_as_their_bounded_rate_allows() -> None:
    rate = {"request.refused rejected rate_limited": 30}
    assert figures(door(20.0, 20.0, 20.0), rate, 30)["refusal_share"] == 1.0
    unbounded = figures(door(20.0, 20.0, 20.0), {"job.event rejected malformed": 3000}, 3000)
    assert (unbounded["refusal_rows"], unbounded["refusal_share"]) == (3000, 100.0)


def test_rows_of_a_flood_are_those_of_its_principal_its_stream_and_its_mailbox() -> None:
    order = Order("mqtt", Settings(), "loud", sink="sink")
    rows = [
        row("loud", "default/other", "message.posted", "accepted"),
        row("unverified", "loud", "agent.said", "accepted"),
        row("unverified", "default/sink", "message.posted", "rejected", reason="mailbox_full"),
        row("loud", "http", "request.refused", "rejected", reason="rate_limited"),
        row("calm", "default/calm", "message.posted", "accepted"),
        row("calm", "http", "request.refused", "rejected", reason="policy"),
    ]
    counts = rows_of(rows, order)
    assert counts == {
        "message.posted accepted": 1,
        "agent.said accepted": 1,
        "message.posted rejected mailbox_full": 1,
        "request.refused rejected rate_limited": 1,
    }
    assert refusals_in(counts) == 2


def test_a_flood_that_costs_others_more_than_twice_their_time_is_not_held() -> None:
    held = {"worst_memory_share": 1.0, "worst_refusal_share": 0.2, "worst_healthz_delay_ms": 100.0}
    assert not_held({"worst_control_ratio": 2.1, **held}, AT_MOST) == [
        "worst_control_ratio is 2.1, at most 2.0"
    ]


def test_the_options_have_all_doors_and_the_limit_of_an_operator_by_default() -> None:
    args = benchmark().parse_args([])
    assert (args.doors, args.seconds, args.rounds, args.nice) == (list(DOORS), 30, 2, 0)
    assert (args.unlimited, args.per_minute) == (False, 600)
    given = benchmark().parse_args(["--doors", "mqtt,jobs", "--unlimited", "--seconds", "2"])
    assert (given.doors, given.unlimited, given.seconds) == (["mqtt", "jobs"], True, 2.0)


@pytest.mark.parametrize("arguments", [["--doors", "smoke"], ["--doors", ","], ["--limited", "--unlimited"]])
def test_an_unknown_door_and_contradicting_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark().parse_args(arguments)
    assert ended.value.code == 2


@pytest.mark.long
def test_the_control_uses_as_much_of_the_processor_as_it_should() -> None:
    shares = []
    with flooding(Order(BURN, Settings(), BURN, "0.4")) as burner:
        for _ in range(10):  # other tests may take the processor from it for a while
            burner.begin(0.5)
            found = burner.result(20)
            assert found.sent == 0
            shares.append(found.cpu_s / found.seconds)
            if shares[-1] > 0.25:
                break
    assert shares[-1] > 0.25 and max(shares) < 0.55, shares


@pytest.mark.long
def test_flooder_and_control_lead_sessions_of_their_own_so_that_they_take_no_time_from_the_clients() -> None:
    with flooding(Order(BURN, Settings(), BURN, "0.1"), niceness=1):
        (process,) = multiprocessing.active_children()
        assert process.pid is not None
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 1


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_benchmark_and_its_flooder_in_the_middle_of_a_turn(ending: signal.Signals) -> None:
    bench = subprocess.Popen([sys.executable, "-c", IN_A_TURN], cwd=PROJECT_ROOT, stdout=subprocess.PIPE)
    assert bench.stdout is not None
    flooder = psutil.Process(int(bench.stdout.readline()))
    began = time.monotonic()
    bench.send_signal(ending)
    bench.communicate(timeout=20)
    assert bench.returncode != 0
    assert not flooder.is_running()
    assert time.monotonic() - began < 4  # it waits for no turn


@pytest.mark.long
def test_a_flooder_that_cannot_flood_is_an_error(tmp_path: Path) -> None:
    order = Order("mcp", Settings(data_dir=tmp_path), "loud", "no key")
    with pytest.raises(RuntimeError, match="the flooder of mcp cannot flood"), flooding(order):
        pass


@pytest.mark.slow
def test_a_flood_at_one_door_is_measured_and_leaves_few_rows() -> None:
    bench = [sys.executable, "-m", "tests.benchmarks.flood"]
    asked = ["--doors", "http", "--seconds", "3", "--rounds", "1", "--per-minute", "60", "--json"]
    done = subprocess.run([*bench, *asked], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    http = found["doors"]["http"]
    assert 60 <= http["answers"]["200"] <= 70
    # Held answers: a client that is not held up gets thousands.
    assert 20 < http["answers"]["429"] < 500
    assert http["ledger_rows"]["message.posted accepted"] == http["answers"]["200"]
    assert 1 <= http["refusal_rows"] <= 10
    assert found["worst_memory_share"] <= 1
    assert {"file", "http", "mcp", "mqtt"} == http["flood"].keys() == http["control"].keys()
