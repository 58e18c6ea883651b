"""The threats page is true: each threat has tests that exist, each fuzzer is in its table; and CI looks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.source_files import ROOT, files_with_tests, text_of

PAGE = (ROOT / "docs" / "explanation" / "threats.md").read_text(encoding="utf-8")
ENTRIES = [f"ASI{number:02}" for number in range(1, 11)]
# Rules of bandit that look at an import alone; all others that it leaves out must be ruff's.
IMPORTS = {"B403", "B404", "B406"}
# Lines of .ci/run that make it scan, and fail when a scan finds something.
CI_LINES = (
    "set -euo pipefail",
    "  .venv/bin/ruff check --quiet . || failed=1",
    "  .venv/bin/bandit --quiet --recursive --configfile pyproject.toml connectors jobs schemas notebooks"
    " || failed=1",
    "  .venv/bin/python .ci/secret_scan.py || failed=1",
    '  return "$failed"',
    'static_checks >"$report" 2>&1 &',
    "static=$!",
    'wait "$static" || failed=1',
    'exit "$failed"',
)


@cache
def written_tests() -> frozenset[str]:
    """The names of all tests."""
    return frozenset(
        name for path in files_with_tests() for name in re.findall(r"def (test_\w+)\(", text_of(path))
    )


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, by cells."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def named_in(text: str) -> list[str]:
    """The tests that a text names."""
    return re.findall(r"`(test_\w+)`", text)


def test_every_threat_has_an_entry_a_defence_and_tests_that_exist() -> None:
    rows = rows_of("The table")
    assert len(rows) > 30
    for who, tried, entry, defence, shown in rows:
        line = f"{who}, {tried}"
        assert entry in ENTRIES, f"{line}: no entry of the ten"
        assert defence, f"{line}: no defence"
        assert named_in(shown), f"{line}: no test"
        assert [name for name in named_in(shown) if name not in written_tests()] == [], f"{line}: no such test"


def test_of_each_of_the_ten_entries_it_is_said_what_is_defended_and_what_is_not() -> None:
    assert sorted({row[2] for row in rows_of("The table")}) == ENTRIES
    assert [row[0] for row in rows_of("Open risks")] == ENTRIES


def test_every_fuzzer_is_in_its_table_and_every_one_in_the_table_exists() -> None:
    named = [name for row in rows_of("Fuzzers") for name in named_in(row[1])]
    assert sorted(name for name in named if name not in written_tests()) == []
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests" / "fuzz").glob("test_*.py"))]
    written = {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    assert sorted(written - set(named)) == []
    assert all(len(named_in(row[1])) == 1 and row[2] for row in rows_of("Fuzzers"))


def test_every_package_is_pinned_to_a_version_and_its_hashes_and_no_other_is_installed() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in lock.splitlines() if line and not line.lstrip().startswith("#")]
    assert len(lines) > 50
    java = (ROOT / "conf" / "java.lock").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    assert len(java) == 1
    for line in [*lines, *java]:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==[\w.+!-]+ ", line), line[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", line), line[:80]
    wrapper = (ROOT / "trunkline").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [line for line in wrapper.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes -r " in line for line in installs)


def test_the_parts_of_the_jvm_are_pinned_to_one_revision_each() -> None:
    parts = ElementTree.parse(ROOT / "conf" / "ivy.xml").getroot().iter("dependency")  # noqa: S314  our own file
    revisions = {part.get("name"): part.get("rev") or "" for part in parts}
    assert revisions
    assert {
        name: rev for name, rev in revisions.items() if not re.fullmatch(r"\d+(\.\d+)+(-[\w.]+)?", rev)
    } == {}


def test_what_bandit_leaves_out_ruff_looks_at_in_every_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        tool = tomllib.load(file)["tool"]
    lint = tool["ruff"]["lint"]
    assert "S" in lint["select"]
    assert [rule for rule in lint["ignore"] if rule.startswith("S")] == []
    excepted = {
        pattern for pattern, rules in lint["per-file-ignores"].items() if any(r[0] == "S" for r in rules)
    }
    assert excepted == {"notebooks/**", "tests/**"}
    known = subprocess.run(
        [sys.executable, "-m", "ruff", "rule", "--all", "--output-format", "json"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    twice = set(tool["bandit"]["skips"]) - IMPORTS
    assert sorted(rule for rule in twice if f'"code": "S{rule[1:]}"' not in known) == []


def lacks(script: str) -> list[str]:
    """The lines of CI_LINES that do not stand in a script, whole and in this order."""
    lines = iter([line.rstrip() for line in script.splitlines()])
    return [wanted for wanted in CI_LINES if wanted not in lines]


def test_ci_looks_and_ends_with_an_error_when_something_is_found() -> None:
    assert lacks((ROOT / ".ci" / "run").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("line", CI_LINES)
@pytest.mark.parametrize("spoil", ["# {}", "{} || true", "if false; then {}; fi", "echo {}", ""])
def test_a_line_of_ci_that_looks_no_more_is_noticed(line: str, spoil: str) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert lacks(script.replace(f"\n{line}\n", f"\n{spoil.format(line)}\n")) != []


@pytest.mark.long
def test_the_scan_finds_a_planted_secret_and_does_not_repeat_it(tmp_path: Path) -> None:
    secret = "AKIA" + "Q7ZK3M5PX2W8D4VT"
    unread = "neither UTF-8 text nor a PNG: nobody can look for secrets in it"
    expected = {}
    for name, encoding, found in (
        ("planted.py", "utf-8", "AWS Access Key"),
        ("planted.css", "utf-8", "AWS Access Key"),
        ("planted.svg", "utf-8", "AWS Access Key"),
        ("requirements.lock", "utf-8", "AWS Access Key"),
        ("poetry.lock", "utf-8", "AWS Access Key"),
        ("planted.txt", "latin-1", unread),
        ("planted.png", "utf-16", unread),
    ):
        planted = tmp_path / name
        planted.write_bytes(f'NAME = "{secret}" /* ü */\n'.encode(encoding))
        expected[planted] = f"{planted}:1: {found}"
    clean = tmp_path / "clean.py"
    clean.write_text('NAME = "a name"\n')
    scan = [sys.executable, str(ROOT / ".ci" / "secret_scan.py")]
    done = subprocess.run([*scan, *expected, clean], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert sorted(done.stderr.splitlines()) == sorted(expected.values())
    assert subprocess.run([*scan, clean], capture_output=True, timeout=60).returncode == 0
