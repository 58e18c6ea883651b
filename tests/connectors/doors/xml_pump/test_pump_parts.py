"""The pump as parts of the local stack: as many as the settings say, each with a life and a name of its own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from connectors.doors.xml_pump.pump_program import take_name
from connectors.programs.local_stack.part import Part
from connectors.programs.local_stack.part_plan import ALL_PARTS, STOP_ORDER, XML_PUMP
from connectors.programs.local_stack.program_plans import xml_pump_plan
from connectors.programs.local_stack.stack import plans_of
from schemas.settings.settings import Settings, XmlPumpSettings
from tests.broker_processes import wait_until


def with_processes(folder: Path, count: int) -> Settings:
    """Settings of a stack with so many pumps."""
    return Settings(data_dir=folder, xml_pump=XmlPumpSettings(processes=count))


@pytest.mark.requirement("XP-08")
def test_a_stack_has_as_many_pumps_as_the_settings_say(tmp_path: Path):
    for count, expected in ((0, []), (1, ["xml_pump"]), (3, ["xml_pump", "xml_pump_2", "xml_pump_3"])):
        plans = plans_of(with_processes(tmp_path, count), ALL_PARTS)
        assert [plan.name for plan in plans if plan.group == XML_PUMP] == expected
    # A pump tells the gateway what it has done.
    assert STOP_ORDER.index(XML_PUMP) < STOP_ORDER.index("gateway")


def test_a_pump_that_dies_takes_no_other_with_it(tmp_path: Path):
    settings = with_processes(tmp_path, 2)
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    parts = []
    for number in (1, 2):
        plan = replace(xml_pump_plan(settings, number), command=lambda: command, cwd=tmp_path)
        parts.append(Part(plan, settings))
    (tmp_path / "run").mkdir()
    try:
        for part in parts:
            part.launch()
        first, second = (part.pid for part in parts)
        assert first is not None
        psutil.Process(first).kill()
        wait_until(lambda: parts[0].pid is None, what="it has died")
        assert parts[0].look_after()
        assert parts[1].pid == second
    finally:
        for part in parts:
            part.kill()
            part.stop()


@pytest.mark.requirement("XP-08")
def test_two_living_pumps_never_have_one_name_and_a_successor_has_that_of_the_dead(tmp_path: Path):
    first, lock = take_name(tmp_path)
    second, other_lock = take_name(tmp_path)
    with other_lock:
        assert first.startswith("pump-1-")
        assert second.startswith("pump-2-")
        lock.close()
        successor, lock = take_name(tmp_path)
        lock.close()
        assert successor == first
