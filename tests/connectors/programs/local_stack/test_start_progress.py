"""Starts are judged by their progress: a part with a tenth of the processor starts, one that hangs does not."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.programs.local_stack import child_process
from connectors.programs.local_stack.mosquitto_plan import mosquitto_plan
from connectors.programs.local_stack.part import READY, WAITING, Part
from connectors.programs.local_stack.part_plan import PartPlan
from schemas.settings.settings import Settings
from tests.starved import a_tenth_of_the_processor

# Works for 0.4 s of processor time, in silence, then says that it is ready.
SLOW = """
import pathlib, signal, sys, time
while time.process_time() < 0.4:
    pass
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""
HANGS = "import signal; signal.pause()"


def plan_of(settings: Settings, program: str, ready: Path, stalled_after_s: float) -> PartPlan:
    return replace(
        mosquitto_plan(settings),
        prepare=lambda: ready.unlink(missing_ok=True),
        command=lambda: [sys.executable, "-S", "-c", program, str(ready)],
        is_ready=ready.exists,
        stalled_after_s=stalled_after_s,
    )


def look_after_until_settled(part: Part, failures: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not part.is_ready and part.failures < failures:
        assert time.monotonic() < deadline, "neither ready nor given up"
        part.look_after()
        time.sleep(0.05)


@pytest.mark.requirement("OP-01")
def test_a_start_that_makes_progress_is_never_killed_and_one_that_makes_none_is(
    stack_settings: Settings, tmp_path: Path
):
    ready = tmp_path / "ready"
    slow = Part(plan_of(stack_settings, SLOW, ready, stalled_after_s=2.0), stack_settings)
    slow.schedule()
    try:
        began = time.monotonic()
        with a_tenth_of_the_processor(child_process.mark_of(stack_settings.data_path, "mosquitto")):
            look_after_until_settled(slow, 1, 60)
        assert (slow.state, slow.failures) == (READY, 0)
        assert time.monotonic() - began > 2.0, "longer than a part may be silent"
    finally:
        slow.kill()
    hangs = Part(plan_of(stack_settings, HANGS, ready, stalled_after_s=2.0), stack_settings)
    hangs.schedule()
    try:
        look_after_until_settled(hangs, 1, 30)
        assert (hangs.state, hangs.pid) == (WAITING, None)
        assert "made no progress for 2 s" in str(hangs.failure)
    finally:
        hangs.kill()
