"""Every setting, reason, record type, kind of stream, job, door and table is named in the docs."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from schemas.settings.settings import Settings
from schemas.streams.fold import KINDS, RECORD_TYPES, VIEW_TABLES
from schemas.tables import ledger
from tests.source_files import ROOT, files_with_tests, text_of, tree_of
from trunkline_agent.wire.verdicts import REASONS


@cache
def docs() -> str:
    """All pages of docs/, without the decision records."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*/*.md")))


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of each setting."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from settings_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def jobs() -> list[str]:
    """The programs for spark-submit: files of jobs/ that can be run."""
    return [p.stem for p in sorted((ROOT / "jobs").glob("*.py")) if '__name__ == "__main__"' in p.read_text()]


def doors() -> list[str]:
    """The doors: the packages directly below connectors/doors/."""
    return sorted(path.parent.name for path in (ROOT / "connectors" / "doors").glob("*/__init__.py"))


def tables() -> list[str]:
    """The tables that the contracts name."""
    return [ledger.LEDGER, "dead_letters", *VIEW_TABLES]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("settings", list(settings_of(Settings))),
        ("reasons", list(REASONS)),
        ("record types", list(RECORD_TYPES)),
        ("kinds of streams", list(KINDS)),
        ("jobs", jobs()),
        ("doors", doors()),
        ("tables", tables()),
    ],
    ids=["settings", "reasons", "record types", "kinds of streams", "jobs", "doors", "tables"],
)
def test_the_docs_name_every_one_of_them(what: str, names: list[str]) -> None:
    assert names, f"no {what} were found to look for"
    missing = [name for name in names if f"`{name}`" not in docs()]
    assert not missing, f"docs/*.md name none of these {what} (as `name`): {', '.join(missing)}"


@pytest.mark.long
@pytest.mark.requirement("HO-12")
def test_the_reference_pages_follow_from_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = str(ROOT / ".ci" / "reference_pages.py")
    monkeypatch.setenv("COLUMNS", "100")  # as the program sets it, and no longer than this test
    monkeypatch.setattr(sys, "argv", [program, "--check"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(program)["main"]() == 0, capsys.readouterr().err


LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_docs_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            file = page.parent / target if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_every_test_that_the_guarantees_name_exists() -> None:
    page = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    written = {name for path in files_with_tests() for name in re.findall(r"def (test_\w+)\(", text_of(path))}
    assert named, "the guarantees name no tests"
    assert named - written == set()


def slow_tests() -> set[str]:
    """The names of the tests that only `-m slow` runs, by their marks or that of their file."""
    found: set[str] = set()
    for path in files_with_tests():
        body = tree_of(path).body
        texts = [ast.unparse(one) for one in body if isinstance(one, ast.Assign)]
        is_slow = any(text.startswith("pytestmark") and "mark.slow" in text for text in texts)
        for one in body:
            if isinstance(one, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in one.decorator_list]
                found |= {one.name} if is_slow or any("mark.slow" in mark for mark in marks) else set()
    return found


@pytest.mark.parametrize("page", ["guarantees.md", "threats.md"])
def test_what_only_a_slow_test_shows_is_said_to_be_so(page: str) -> None:
    text = (ROOT / "docs" / "explanation" / page).read_text(encoding="utf-8")
    marked = dict(re.findall(r"`(test_\w+)`( \(slow\))?", text))
    assert {name for name, mark in marked.items() if mark} == marked.keys() & slow_tests()
