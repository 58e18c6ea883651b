"""One run of another program under `trunkline-agent run`: input, output, limits, and signals to us."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from trunkline_agent.command.child_program import ChildProgram, Ended, Limits
from trunkline_agent.command.stop_signals import Stopped, StopSignals
from trunkline_agent.errors import UsageError

pytestmark = pytest.mark.requirement("AG-89")


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    with StopSignals() as found:
        yield found


def run(stop: StopSignals, script: str, stdin: bytes = b"", limits: Limits | None = None) -> Ended:
    """Run a shell script to its end."""
    return ChildProgram(["sh", "-c", script], stdin, limits or Limits(), {"PATH": os.environ["PATH"]}).run(stop)


def signal_when_started(path: str, number: int, times: int = 1) -> threading.Thread:
    """Send a signal to us when the program has made its file."""

    def send() -> None:
        for _ in range(2000):
            if os.path.exists(path):  # noqa: PTH110
                break
            time.sleep(0.005)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_program_reads_its_input_and_its_output_and_exit_code_are_returned(stop: StopSignals) -> None:
    assert run(stop, "cat", b"x" * 200_000).output == b"x" * 200_000
    ended = run(stop, "echo out; exit 3")
    assert (ended.exit_code, ended.output, ended.fault, ended.is_good) == (3, b"out\n", "exit code 3", False)
    assert run(stop, "kill -9 $$").fault == "ended by SIGKILL"
    # It does not read its input, which is larger than a pipe.
    assert run(stop, "exit 0", b"x" * 200_000).is_good


@pytest.mark.long
def test_output_after_a_background_process_keeps_the_pipe_is_returned_without_waiting_for_it(
    stop: StopSignals,
) -> None:
    began = time.monotonic()
    ended = run(stop, "sleep 30 & echo $!")
    os.kill(int(ended.output), signal.SIGKILL)
    assert ended.is_good
    assert time.monotonic() - began < 10


@pytest.mark.long
def test_a_program_over_its_time_is_ended_and_killed_if_it_stays(stop: StopSignals) -> None:
    ended = run(stop, "sleep 30", limits=Limits(time_s=0.2))
    assert (ended.fault, ended.exit_code) == ("not done within 0.2 s", -signal.SIGTERM)
    stubborn = run(stop, "trap '' TERM; sleep 30 & wait; wait", limits=Limits(time_s=0.2, grace_s=0.3))
    assert (stubborn.fault, stubborn.exit_code) == ("not done within 0.2 s", -signal.SIGKILL)


def test_a_program_that_writes_more_than_its_limit_is_ended(stop: StopSignals) -> None:
    ended = run(stop, "exec yes", limits=Limits(output_bytes=1000))
    assert ended.fault == "more than 1000 bytes of output"
    assert len(ended.output) <= 1000


def test_a_program_that_cannot_be_started_is_a_usage_error(stop: StopSignals) -> None:
    with pytest.raises(UsageError, match="cannot run 'no-such-program': No such file"):
        ChildProgram(["no-such-program"], b"", Limits(), {})


def test_a_signal_to_us_ends_the_program_first_and_it_may_tidy_up(stop: StopSignals, tmp_path) -> None:
    began = tmp_path / "began"
    thread = signal_when_started(str(began), signal.SIGTERM)
    ended = run(stop, f"trap 'echo tidied; exit 0' TERM; touch {began}; while :; do sleep 0.05; done")
    thread.join()
    assert (ended.output, ended.exit_code) == (b"tidied\n", 0)
    assert (ended.is_good, ended.fault) == (False, "ended because of SIGTERM")
    with pytest.raises(Stopped), stop.waiting():
        pytest.fail("a signal that came before ends the wait at once")


def test_a_second_signal_kills_the_program_at_once(stop: StopSignals, tmp_path) -> None:
    began = tmp_path / "began"
    thread = signal_when_started(str(began), signal.SIGINT, times=2)
    before = time.monotonic()
    with pytest.raises(Stopped) as raised:
        run(stop, f"trap '' TERM; touch {began}; while :; do sleep 0.05; done")
    thread.join()
    assert raised.value.exit_code == 130
    assert time.monotonic() - before < 8


def test_a_signal_outside_of_a_wait_cuts_nothing_in_half(stop: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    steps = [1, 2]
    assert (stop.number, steps) == (signal.SIGTERM, [1, 2])
    with pytest.raises(Stopped):
        stop.check()


def test_each_piece_of_output_is_passed_on_as_it_comes(stop: StopSignals) -> None:
    seen: list[bytes] = []
    program = ChildProgram(
        [sys.executable, "-c", "print('a', flush=True); input(); print('b')"],
        b"\n",
        Limits(),
        {},
        seen.append,
    )
    assert program.run(stop).output == b""
    assert b"".join(seen) == b"a\nb\n"
