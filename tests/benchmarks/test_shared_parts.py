"""The parts that benchmarks share: rounds in turns, ratios, limits, processor time, checkouts, lean clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.programs.local_stack.part_plan import GATEWAY, KAFKA
from schemas.settings.settings import PROJECT_ROOT
from tests.benchmarks import all_bench
from tests.benchmarks.bench_report import LOAD, add_phase, in_turns, judged, medians, prefixed, ratios
from tests.benchmarks.bench_stack import CheckoutStack, checkout_of
from tests.benchmarks.hub_load import Agents
from tests.benchmarks.process_times import Meter, process_s
from tests.own_settings import stack_settings

pytestmark = pytest.mark.requirement("ST-66")


def test_sides_take_turns_and_each_round_is_reported_when_it_has_ended() -> None:
    order: list[str] = []
    said: list[str] = []

    def side(name: str) -> Any:
        def measure() -> dict[str, Any]:
            order.append(name)
            return {"rate": len(order)}

        return measure

    found = in_turns(3, {"ours": side("ours"), "peer": side("peer")}, said.append)
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert found == {
        "ours": [{"rate": 1}, {"rate": 4}, {"rate": 5}],
        "peer": [{"rate": 2}, {"rate": 3}, {"rate": 6}],
    }
    assert said[2] == 'peer, round 2: {"rate": 3}'


def test_medians_go_into_the_figures_of_each_process_and_have_four_digits() -> None:
    rounds = [
        {"rate": rate, "us_per_op": {"gateway": us}} for rate, us in ((1234.56, 9), (1, 5.67891), (9999.9, 1))
    ]
    assert medians(rounds) == {"rate": 1235, "us_per_op": {"gateway": 5.679}}
    assert prefixed("peer", medians(rounds[:1])) == {"peer_rate": 1235, "peer_us_per_op": {"gateway": 9}}


def test_a_ratio_of_processor_times_is_that_of_all_servers_without_the_load() -> None:
    figures = {
        "us_per_op": {"gateway": 600, "kafka": 200, LOAD: 55},
        "peer_us_per_op": {"front": 300, "nats": 100, LOAD: 99},
        "rate": 9,
        "nothing": 0,
    }
    pairs = {
        "cpu": ("us_per_op", "peer_us_per_op"),
        "absent": ("rate", "peer_rate"),
        "void": ("rate", "nothing"),
    }
    assert ratios(figures, pairs) == {"cpu": 2, "void": None}


def test_a_phase_that_fails_leaves_the_figures_of_the_others_and_is_an_error() -> None:
    found: dict[str, Any] = {}

    def fails() -> dict[str, Any]:
        raise ValueError("no broker")

    add_phase(found, lambda: {"sends_per_s": 1})
    add_phase(found, fails)
    add_phase(found, lambda: {"visible_p99_ms": 2})
    assert found == {"sends_per_s": 1, "visible_p99_ms": 2, "errors": ["ValueError: no broker"]}


def test_held_limits_are_listed_beside_those_that_are_not() -> None:
    assert judged({"p99": 3, "rate": 5}, {"p99": 3}, {"rate": 6, "absent": 1}) == {
        "held": ["p99 is 3, at most 3"],
        "not_held": ["rate is 5, at least 6", "absent is None, at least 1"],
    }


@pytest.mark.long
def test_processor_time_counts_threads_and_children_that_have_ended() -> None:
    busy = "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass\n"
    in_thread = f"import threading\ndef busy():\n {busy.replace(chr(10), chr(10) + ' ')}\n"
    code = (
        f"import subprocess, sys\n{in_thread}one = threading.Thread(target=busy)\none.start()\none.join()\n"
        f"subprocess.run([sys.executable, '-S', '-c', {busy!r}])\nprint(flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.4 <= process_s(process.pid) < 1.5
        meter = Meter({"idle": process.pid})
        meter.begin()
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        meter.end()
        found = meter.us_per(10)
        process.communicate()
    assert found["idle"] < 1000 < 5000 <= found[LOAD]
    with pytest.raises((OSError, psutil.NoSuchProcess)):
        process_s(process.pid)


@pytest.mark.long
def test_a_commit_is_checked_out_below_the_folder_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    root = checkout_of("HEAD", tmp_path)
    assert root == tmp_path / "checkout"
    assert (root / "connectors" / "programs" / "gateway_program").is_dir()
    assert (root / ".jars").resolve() == (PROJECT_ROOT / ".jars").resolve()
    assert checkout_of(str(root), tmp_path) == root
    with pytest.raises(SystemExit, match="--against no-such-commit"):
        checkout_of("no-such-commit", tmp_path)


def test_the_stack_of_another_checkout_has_its_gateway_and_our_broker(tmp_path: Path) -> None:
    root = tmp_path / "other"
    ours, other = (
        CheckoutStack(stack_settings(tmp_path / "data"), (KAFKA, GATEWAY), at) for at in (PROJECT_ROOT, root)
    )
    assert other[GATEWAY].plan.cwd == root
    assert other[GATEWAY].plan.environment["PYTHONPATH"].split(":") == [
        str(root),
        str(root / "connectors" / "agent_sdk"),
    ]
    assert other[GATEWAY].plan.command() == ours[GATEWAY].plan.command()
    assert "PYTHONPATH" not in other[KAFKA].plan.environment


def test_an_agent_opens_as_many_connections_as_it_has_requests_under_way_and_keeps_them() -> None:
    heads: list[bytes] = []
    accepted, answer = 0, b'{"message_id": "m1", "messages": [{"id": "m1"}]}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                heads.append(head + await reader.readexactly(int(size or 0)))
                await asyncio.sleep(0.02)
                status = 404 if b"of-bob" in head else 200
                writer.write(b"HTTP/1.1 %d\r\ncontent-length: %d\r\n\r\n%s" % (status, len(answer), answer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Agents(port, {"ann": "token-of-ann", "bob": "token-of-bob"}) as agents:
            sent, drained = await asyncio.gather(agents.send("ann", "bob"), agents.drain("ann"))
            assert (sent, drained) == ("m1", ["m1"])
            assert await agents.send("ann", "bob") == "m1"
            assert accepted == 2
            with pytest.raises(RuntimeError, match="bob got 404"):
                await agents.drain("bob")
        server.close()

    asyncio.run(run())
    assert len(set(heads[:3])) == 2
    assert heads[2] in heads[:2]
    assert b"Authorization: Bearer token-of-ann" in heads[2]


def test_each_benchmark_with_limits_is_one_of_all_and_those_to_compare_have_the_option() -> None:
    folder, with_limits = Path(all_bench.__file__).parent, set()
    for path in folder.glob("*.py"):
        source = "" if path.stem.startswith("test_") else path.read_text()
        if "    bench = Bench(" in source and re.search("AT_MOST|AT_LEAST|at_most=|judged|errors", source):
            with_limits.add(path.stem.removesuffix("_bench"))
    assert {run[0] for run in all_bench.RUNS} == with_limits - {"inbox"}
    for name in all_bench.AGAINST:
        path = next(path for path in folder.glob("*.py") if path.stem.removesuffix("_bench") == name)
        assert '"--against"' in path.read_text()
    assert ("wake", "--against", "HEAD") in all_bench.runs_of(["wake"], "HEAD")
    assert all_bench.runs_of(["drain"], None) == [("drain",)]


def test_all_prints_each_limit_and_a_benchmark_that_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"hub": {"held": ["a is 1, at most 2"], "not_held": ["b is 3, at most 2"]}, "mcp": None}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        result = results[Path(command[1]).stem.removesuffix("_bench")]
        return subprocess.CompletedProcess(command, 1, json.dumps(result) + "\n" if result else "")

    monkeypatch.setattr(all_bench, "RUNS", (("hub",), ("mcp",)))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert all_bench.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "held      hub                        a is 1, at most 2",
        "NOT HELD  hub                        b is 3, at most 2",
        "ERROR     mcp                        it ended with exit code 1 and without a result",
        "1 held, 1 not held, 1 errors",
    ]
    monkeypatch.setattr(sys, "argv", ["bench", "--json"])
    assert all_bench.main() == 1
    found = json.loads(capsys.readouterr().out)
    assert found["not_held"] == ["hub: b is 3, at most 2"]
    assert set(found["runs"]) == {"hub", "mcp"}
