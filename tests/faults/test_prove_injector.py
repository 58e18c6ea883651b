"""The injector of `./trunkline prove`: what was left out is said, and a second one of a part is judged."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from tests.faults.prove.brokers import Brokers
from tests.faults.prove.delivery_load import NEEDED
from tests.faults.prove.injector import Injector
from tests.faults.prove.oracle import Oracle
from tests.faults.prove.schedule import CRASH, KILL, STOP, Injection, draw_schedule
from tests.faults.prove.second_programs import judge_second
from tests.faults.prove.seed_parts import SeedParts, seed_settings
from tests.faults.prove.seed_run import DOORS, not_tried
from trunkline_agent.errors import BackboneUnreachable, Refused


@pytest.mark.stack
def test_a_fault_that_was_not_injected_or_was_ended_early_is_said(tmp_path: Path) -> None:
    brokers = Brokers(tmp_path / "brokers")
    parts = SeedParts(seed_settings(tmp_path, brokers, 1), tmp_path, {})
    faults = (
        Injection(f"{STOP}:bridge", 0.0, 20.0),
        Injection(f"{STOP}:files", 0.0),
        Injection(f"{CRASH}:gateway.reactor_seen", 0.0),
        Injection(f"{KILL}:gateway", 60.0),
        Injection(f"{CRASH}:files.after_kafka_ack", 60.0),
    )
    schedule = dataclasses.replace(draw_schedule(1), injections=faults)
    injector = Injector(parts, brokers, Oracle(tmp_path / "oracle.jsonl"), schedule, ["http://gateway"])
    began = time.monotonic()
    while len(injector.done) < 2 and time.monotonic() < began + 10:
        injector.tick()
        time.sleep(0.02)
    injector.tick()
    assert not injector.over
    injector.heal()
    assert injector.over
    assert [what.partition(" ")[0] for what in injector.left_out] == [
        f"{KILL}:gateway",
        f"{CRASH}:files.after_kafka_ack",
        f"{STOP}:bridge",
    ]
    assert "was to last 20 s and was ended after" in injector.left_out[-1]


def test_a_door_without_an_acknowledgement_and_a_second_gateway_that_nobody_asked_are_said() -> None:
    each, enough = dict.fromkeys(DOORS, 1), dict.fromkeys(NEEDED, 1)
    assert not_tried(each, enough, has_shared=False, answers_elsewhere=0) == []
    assert not_tried(each, enough, has_shared=True, answers_elsewhere=3) == []
    assert not_tried(each, enough, has_shared=True, answers_elsewhere=0) == [
        "the second gateway answered nobody"
    ]
    for door in DOORS:
        some = {name: count for name, count in each.items() if name != door}
        assert not_tried(some, enough, has_shared=False, answers_elsewhere=0) == [
            f"the door {door} acknowledged nothing"
        ]
    enough["nack"] = 0
    assert not_tried(each, enough, has_shared=False, answers_elsewhere=0) == ["no delivery of the kind nack"]


def judged(name: str, **facts: object) -> tuple[str | None, bool]:
    """The judgement on a second one that nothing disturbs, but for these facts."""
    usual = {
        "exit_code": None,
        "is_ready": False,
        "stands_by": False,
        "is_alone": False,
        "was_troubled": False,
        "is_late": False,
    }
    return judge_second(name, **(usual | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bridge", "files", "gateway", "xml_pump"])
def test_a_second_one_that_crashes_or_never_shows_itself_misbehaves(name: str) -> None:
    assert judged(name) == (None, False)
    for code in (0, 1, -11):
        assert judged(name, exit_code=code) == (f"ended with {code}", False)
        assert judged(name, exit_code=code, was_troubled=True) == (None, False)
    assert judged(name, exit_code=BackboneUnreachable.exit_code) == (None, False)
    what, shows = judged(name, is_late=True)
    assert what is not None and "has not shown itself" in what and not shows
    assert judged(name, is_late=True, was_troubled=True) == (None, False)


@pytest.mark.parametrize("name", ["gateway", "xml_pump"])
def test_a_second_one_that_shares_is_ready(name: str) -> None:
    assert judged(name, is_ready=True) == (None, True)


@pytest.mark.parametrize("name", ["bridge", "files"])
def test_a_second_one_that_stands_by_does_not_work_beside_the_first(name: str) -> None:
    assert judged(name, stands_by=True) == (None, True)
    assert judged(name, stands_by=True, is_ready=True) == (None, True)
    assert judged(name, is_ready=True) == ("works beside the first", False)
    assert judged(name, is_ready=True, is_alone=True) == (None, True)


@pytest.mark.parametrize("name", ["streams", "gateway_port"])
def test_a_second_one_that_must_refuse_refuses(name: str) -> None:
    assert judged(name, exit_code=Refused.exit_code) == (None, True)
    assert judged(name, exit_code=0) == ("ended with 0", True)
    assert judged(name, is_ready=True) == ("works beside the first", False)
    assert judged(name, is_ready=True, is_alone=True) == (None, True)
    assert judged(name, is_late=True) == ("neither refused nor ended", False)
    assert judged("streams", exit_code=1) == ("ended with 1", True)
    away = BackboneUnreachable.exit_code
    assert judged("streams", exit_code=away) == (f"ended with {away}", True)
    assert judged("streams", exit_code=away, was_troubled=True) == (None, False)
