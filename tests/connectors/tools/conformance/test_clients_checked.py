"""The conformance kit on a live stack: right clients pass, and a planted fault fails the check named for it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from connectors.cli.main import main
from connectors.tools.conformance.run import (
    CHECKS,
    FAILED,
    NOT_SUPPORTED,
    PASSED,
    Result,
    greet,
    run_check,
    run_checks,
)
from connectors.tools.conformance.scene import Check
from connectors.tools.conformance.target import Target, own_target
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.connectors.tools.conformance.planted_faults import ALSO, FAULTS
from tests.programs import required_program, run_program

pytestmark = pytest.mark.stack
REFERENCE = (sys.executable, str(Path(__file__).with_name("reference_program.py")))
BY_NAME = {check.name: check for check in CHECKS}
AT_ONCE = 8
JAVASCRIPT = Path("connectors/agent_sdk/js")
MQTT_FROM_NPM = "mqtt@5.16.0"
NPM_S = 180


def planted(*faults: str) -> list[str]:
    """The command of the reference client with these faults."""
    return [*REFERENCE, *itertools.chain.from_iterable(("--fault", fault) for fault in faults)]


@pytest.fixture(autouse=True)
def _clients_find_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (PROJECT_ROOT, PROJECT_ROOT / "connectors" / "agent_sdk")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with own_target(Settings()) as found:
        yield found


def failures(results: Sequence[Result]) -> dict[str, str]:
    """Why checks failed, by name."""
    return {one.check.name: f"{one.why}\n{one.noise}" for one in results if one.outcome == FAILED}


@pytest.mark.requirement("CF-01")
def test_the_reference_client_passes_every_check(target: Target) -> None:
    results = checked(REFERENCE, target)
    assert failures(results) == {}
    assert {one.outcome for one in results} == {PASSED}


def checked(command: Sequence[str], target: Target) -> list[Result]:
    """The results of all checks."""
    return run_checks(command, greet(command), CHECKS, target)


@pytest.mark.requirement("CF-06")
def test_the_python_library_passes_every_check_that_it_supports(target: Target) -> None:
    results = checked((sys.executable, "-m", "connectors.tools.conformance.python_client"), target)
    assert failures(results) == {}
    # It extends leases by itself, and has no call for it.
    assert [one.check.name for one in results if one.outcome == NOT_SUPPORTED] == ["extends"]


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the JavaScript adapter, in a project that has the library and `mqtt` from npm."""
    node, npm = required_program("nodejs", "node"), required_program("npm", "npm")
    folder = tmp_path_factory.mktemp("javascript")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", "--prefer-offline")
    done = run_program([npm, "install", *quiet, MQTT_FROM_NPM], NPM_S, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    # A copy: a link would look for `mqtt` beside the original.
    shutil.copytree(PROJECT_ROOT / JAVASCRIPT, folder / "node_modules" / "trunkline-agent")
    shutil.copy(PROJECT_ROOT / JAVASCRIPT / "conformance.js", folder)
    return [node, str(folder / "conformance.js"), "trunkline-agent"]


@pytest.mark.requirement("CF-06")
@pytest.mark.node
def test_the_javascript_library_passes_every_check(target: Target, javascript: list[str]) -> None:
    results = checked(javascript, target)
    assert failures(results) == {}
    assert {one.outcome for one in results} == {PASSED}


@pytest.fixture(scope="module")
def by_fault(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Each fault with the result of the check that is named for it."""
    folder = tmp_path_factory.mktemp("faults")

    def run(fault: str) -> Result:
        return run_check(BY_NAME[FAULTS[fault]], planted(fault), target, folder / fault)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(FAULTS, pool.map(run, FAULTS), strict=True))


@pytest.mark.requirement("CF-02")
@pytest.mark.requirement("CF-07")
@pytest.mark.requirement("CF-08")
@pytest.mark.requirement("CF-09")
@pytest.mark.requirement("CF-10")
@pytest.mark.requirement("CF-11")
@pytest.mark.requirement("CF-12")
@pytest.mark.requirement("CF-13")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_check_that_is_named_for_it(by_fault: dict[str, Result], fault: str) -> None:
    result = by_fault[fault]
    assert (result.check.name, result.outcome) == (FAULTS[fault], FAILED)
    assert "Error:" not in result.why, "the kit itself failed"


@pytest.mark.requirement("CF-02")
def test_every_check_has_a_fault() -> None:
    assert sorted(FAULTS.values()) == sorted(BY_NAME)


@pytest.mark.requirement("CF-05")
def test_the_command_checks_a_client_against_a_stack_that_is_named(
    target: Target, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUNKLINE_TOKEN", "the-token-of-another-stack-which-is-not-meant")
    token_file = target.settings.operator_token_file
    given = ["conformance", "--hub", target.settings.gateway_url, "--operator-token-file", str(token_file)]
    with target.hub() as operator:
        before = {one["principal"] for one in operator.get("/api/hub/principals")["principals"]}
        assert main([*given, "--only", "topics", "--only", "job_http_life", "--json", "--", *REFERENCE]) == 0
        after = operator.get("/api/hub/principals")["principals"]
    found = json.loads(capsys.readouterr().out)
    assert found["client"]["name"] == "reference"
    assert [one["outcome"] for one in found["results"]] == [PASSED, PASSED]
    added = [one for one in after if one["principal"] not in before]
    assert len(added) == 3
    assert {one["status"] for one in added} == {"revoked"}
    assert main([*given, "--only", "topics", "--", *planted("forgets_to_unsubscribe")]) == 1
    assert "topics failed. Check that a subscriber gets" in capsys.readouterr().out


AREAS = {
    "vectors": {"canonical", "signing"},
    "hub": {
        "hub",
        "ask",
        "topics",
        "extend",
        "keeps_leases",
        "ends_long_handlings",
        "handlings",
        "discovery",
        "schedules",
        "blobs",
    },
    "jobs": {"job_http", "job_mqtt"},
}


@pytest.mark.requirement("CF-02")
@pytest.mark.slow
@pytest.mark.timeout(900)  # each fault with each check of its area: some 500 checks
@pytest.mark.parametrize("area", AREAS)
def test_a_planted_fault_fails_no_other_check_of_its_area(target: Target, area: str, tmp_path: Path) -> None:
    checks = [check for check in CHECKS if check.needs <= AREAS[area]]
    faults = [fault for fault, name in FAULTS.items() if BY_NAME[name] in checks]
    pairs = list(itertools.product(faults, checks))

    def run(pair: tuple[str, Check]) -> str:
        fault, check = pair
        return run_check(check, planted(fault), target, tmp_path / fault).why

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {pair: why for pair, why in zip(pairs, pool.map(run, pairs), strict=True) if why}
    wanted = {(fault, name) for fault in faults for name in {FAULTS[fault], *ALSO.get(fault, ())}}
    others = {(fault, check.name): why for (fault, check), why in found.items()}
    wrong = [f"{fault} {name}: {others.get((fault, name))}" for fault, name in others.keys() ^ wanted]
    if wrong:
        pytest.fail("\n".join(sorted(wrong)))
