"""Agents in `conf`: each file of definitions or launchers is read whole or reported by name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from connectors.hub.launcher.launch_spec import LaunchRule, read_launchers
from connectors.hub.organism import declared_files
from connectors.hub.organism.declared_files import (
    AgentDefinition,
    Definitions,
    DefinitionWatch,
    read_definitions,
)
from schemas.settings.settings import PROJECT_ROOT, Settings, SettingsError

GOOD = {"name": "good", "image": "images/good"}
FULL = {
    "name": "builder",
    "image": "images/builder:1",
    "description": "Builds\nthings.",
    "capabilities": ["build", "test"],
    "hardened": True,
}


def write(folder: Path, name: str, document: Any) -> Path:
    """A file of the folder: text and bytes as they are, anything else as JSON."""
    path = folder / name
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def with_fields(**fields: Any) -> dict[str, Any]:
    """A definition that is good but for these fields."""
    return {"name": "other", "image": "images/other", **fields}


@pytest.mark.requirement("HH-01")
def test_a_folder_of_good_files_gives_its_agents_with_their_defaults(tmp_path: Path) -> None:
    write(tmp_path, "a.json", GOOD)
    write(tmp_path, "b.json", FULL)
    found = read_definitions(tmp_path)
    assert found.faults == {}
    assert found.agents == {"good": AgentDefinition(**GOOD), "builder": AgentDefinition(**FULL)}
    assert found.agents["good"].model_dump() == {
        **GOOD,
        "description": "",
        "capabilities": [],
        "hardened": False,
    }
    with pytest.raises(ValidationError):
        found.agents["good"].image = "images/evil"  # type: ignore[misc]


@pytest.mark.requirement("HH-01")
def test_the_definitions_that_come_with_us_are_good() -> None:
    found = read_definitions(PROJECT_ROOT / "conf" / "agents")
    assert {name: agent.image for name, agent in found.agents.items()} == {
        "echo": "trunkline/echo",
        "flaky": "trunkline/flaky",
    }
    assert found.faults == {}


@pytest.mark.requirement("HH-01")
@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("", "not JSON"),
        (json.dumps(FULL)[:-1], "not JSON"),
        (b'{"name": "\xff"}', "not UTF-8"),
        ('{"name": "other", "name": "again", "image": "x"}', "a key twice"),
        ([GOOD], "not an object"),
        ({"name": "other"}, "image"),
        ({"image": "x"}, "name"),
        (with_fields(capabilites=["build"]), "unknown: capabilites"),
        (with_fields(name="../etc"), "name: "),
        (with_fields(name="hub"), "name: "),
        (with_fields(name=7), "name: "),
        (with_fields(image=""), "image: "),
        (with_fields(image="x" * 256), "image: "),
        (with_fields(image="a\x1b[31m"), "image: "),
        (with_fields(description="x" * 4001), "description: "),
        (with_fields(description="\x00"), "description: "),
        (with_fields(capabilities=["a", "a"]), "capabilities: "),
        (with_fields(capabilities=["a b"]), "capabilities.0: "),
        (with_fields(capabilities=[f"c{n}" for n in range(65)]), "capabilities: "),
        (with_fields(capabilities="build"), "capabilities: "),
        (with_fields(hardened="yes"), "hardened: "),
        (with_fields(hardened=1), "hardened: "),
        (json.dumps(with_fields()) + " " * (64 * 1024), "larger than 65536 bytes"),
    ],
)
def test_a_bad_file_is_told_by_its_name_and_the_others_are_read(
    tmp_path: Path, document: Any, why: str
) -> None:
    write(tmp_path, "good.json", GOOD)
    write(tmp_path, "bad.json", document)
    found = read_definitions(tmp_path)
    assert list(found.agents) == ["good"]
    assert list(found.faults) == ["bad.json"]
    assert why in found.faults["bad.json"]
    assert found.faults["bad.json"].isprintable()


@pytest.mark.requirement("HH-01")
def test_what_is_at_the_limits_is_taken(tmp_path: Path) -> None:
    most = with_fields(image="x" * 255, description="é" * 4000, capabilities=[f"c{n}" for n in range(64)])
    text = json.dumps(most)
    write(tmp_path, "most.json", text + " " * (64 * 1024 - len(text)))
    assert read_definitions(tmp_path) == Definitions({"other": AgentDefinition(**most)}, {})


@pytest.mark.requirement("HH-01")
def test_of_files_with_one_name_none_is_taken(tmp_path: Path) -> None:
    for file in ("a.json", "b.json"):
        write(tmp_path, file, with_fields())
    write(tmp_path, "c.json", GOOD)
    found = read_definitions(tmp_path)
    assert list(found.agents) == ["good"]
    assert "b.json" in found.faults.pop("a.json")
    assert "a.json" in found.faults.pop("b.json")
    assert found.faults == {}


@pytest.mark.requirement("HH-01")
def test_hidden_and_temporary_files_are_ignored(tmp_path: Path) -> None:
    for file in (".x.json", "x.json~", ".x.json.swp", "x.json.tmp", "#x.json#", "README.md"):
        write(tmp_path, file, "nonsense")
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", "deep.json", GOOD)
    assert read_definitions(tmp_path) == Definitions({}, {})


@pytest.mark.requirement("HH-01")
def test_what_is_no_readable_file_is_a_fault_and_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "lost.json").symlink_to("nowhere.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    write(tmp_path, "linked", GOOD)
    (tmp_path / "link.json").symlink_to("linked")
    write(tmp_path, "odd\udcff\x1b.json", "nonsense")
    found = read_definitions(tmp_path)
    assert list(found.agents) == ["good"]
    assert all(name.isprintable() and why.isprintable() for name, why in found.faults.items())
    assert len(found.faults) == 5
    assert found.faults["pipe.json"] == "not a file"
    assert found.faults["lost.json"].startswith("cannot be read: No such file")


@pytest.mark.requirement("HH-01")
def test_a_file_that_is_written_while_it_is_read_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "a.json", GOOD)
    looks = []

    def fstat(fd: int) -> os.stat_result:
        looks.append(os.stat(fd))
        os.utime(path, ns=(1, len(looks)))
        return looks[-1]

    monkeypatch.setattr(declared_files.os, "fstat", fstat)
    assert read_definitions(tmp_path).faults == {"a.json": "was written while it was read"}
    assert len(looks) == 2


@pytest.mark.requirement("HH-01")
def test_a_folder_that_is_not_there_is_one_fault(tmp_path: Path) -> None:
    found = read_definitions(tmp_path / "agents")
    assert found.agents == {}
    assert list(found.faults) == ["agents"]
    file = write(tmp_path, "file", "")
    assert list(read_definitions(file).faults) == ["file"]


@pytest.mark.requirement("HH-01")
def test_the_watch_tells_all_at_first_and_then_what_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    watch = DefinitionWatch(folder)
    assert watch.changed() == read_definitions(folder)
    assert watch.changed() is None
    folder.mkdir()
    assert watch.changed() == Definitions({}, {})
    path = write(folder, "a.json", GOOD)
    assert watch.changed() == Definitions({"good": AgentDefinition(**GOOD)}, {})
    assert watch.changed() is None
    write(folder, "a.json", "{")
    assert watch.changed() == Definitions({}, {"a.json": "not JSON at character 1"})
    write(folder, ".a.json.swp", "x")
    assert watch.changed() is None
    write(folder, "next", FULL).replace(path)
    assert watch.changed() == Definitions({"builder": AgentDefinition(**FULL)}, {})
    path.unlink()
    assert watch.changed() == Definitions({}, {})


@pytest.mark.requirement("HH-01")
def test_the_watch_reads_only_what_has_changed_or_was_changed_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "a.json", GOOD)
    reads = []

    def counted(folder: Path) -> Definitions:
        reads.append(folder)
        return read_definitions(folder)

    monkeypatch.setattr(declared_files, "read_definitions", counted)
    watch = DefinitionWatch(tmp_path)
    assert watch.changed() is not None
    # The file is of this second: another write may be hidden behind the same times, so it is read again.
    assert watch.changed() is None
    assert len(reads) == 2
    monkeypatch.setattr(declared_files, "_SETTLED_NS", -(10**18))
    assert watch.changed() is None
    assert watch.changed() is None
    assert len(reads) == 3
    # A change of its rights alone, as of a file that becomes readable.
    path.chmod(0o600)
    assert watch.changed() is None
    assert len(reads) == 4


@pytest.mark.requirement("HH-05")
def test_the_launchers_that_come_with_us_have_a_command_for_each_agent() -> None:
    rules = read_launchers(PROJECT_ROOT / "conf" / "launchers.yaml")
    agents = read_definitions(PROJECT_ROOT / "conf" / "agents").agents.values()
    assert {agent.image for agent in agents} == set(rules) - {Settings().agent_mcp.spawn_image}
    echo = rules["trunkline/echo"]
    assert echo.filled_command() == [sys.executable, "-m", "connectors.tools.samples.hub_agent"]
    assert echo.filled_environment() == {"PYTHONPATH": str(PROJECT_ROOT)}
    assert echo.folder() == PROJECT_ROOT


@pytest.mark.requirement("HH-05")
def test_python_and_project_are_filled_in_and_other_braces_stand_for_themselves(tmp_path: Path) -> None:
    text = "a/b: {command: ['{python}', '{\"x\": {}}'], working_dir: '{project}/conf', environment: {A: '{B}'}}"
    rule = read_launchers(write(tmp_path, "launchers.yaml", text))["a/b"]
    assert rule.filled_command() == [sys.executable, '{"x": {}}']
    assert (rule.folder(), rule.filled_environment()) == (PROJECT_ROOT / "conf", {"A": "{B}"})
    assert LaunchRule(command=["x"], working_dir="conf").folder() == PROJECT_ROOT / "conf"
    assert read_launchers(write(tmp_path, "empty.yaml", "# nothing yet\n")) == {}


@pytest.mark.requirement("HH-05")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: {", "cannot read"),
        (b"\xff", "cannot read"),
        ("[a]", "expected a mapping"),
        ("1: {command: [x]}", "1: an image is"),
        ("a: {command: [x]}\na: {command: [y]}", "'a' is written twice"),
        ("a: {command: [x], command: [y]}", "'command' is written twice"),
        ("a: x", "a: "),
        ("a: {}", "a command: "),
        ("a: {command: x}", "a command: "),
        ("a: {command: []}", "a command: "),
        ("a: {command: ['']}", "a command: "),
        ('a: {command: ["\\0"]}', "a command.0: "),
        ("a: {command: [x], memory: 3}", "a memory: "),
        ("a: {command: [x], memory_mb: 0}", "a memory_mb: "),
        ("a: {command: [x], memory_mb: 1.5}", "a memory_mb: "),
        ("a: {command: [x], processes: true}", "a processes: "),
        ("a: {command: [x], environment: {A: 1}}", "a environment.A: "),
        ("a: {command: [x], environment: {A=B: x}}", "a environment.A=B."),
    ],
)
def test_what_is_wrong_in_the_launchers_file_is_told_with_file_image_and_key(
    tmp_path: Path, text: str, why: str
) -> None:
    path = write(tmp_path, "launchers.yaml", text)
    with pytest.raises(SettingsError) as wrong:
        read_launchers(path)
    assert str(path) in str(wrong.value)
    assert why in str(wrong.value)


@pytest.mark.requirement("HH-05")
def test_a_launchers_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"launchers\.yaml"):
        read_launchers(tmp_path / "launchers.yaml")
