"""Requirements and tests name each other: no row without a test, no marked test without a row."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests.source_files import files_with_tests, nodes_of, text_of

ID = re.compile(r"[A-Z]{2}-\d{2}")
ROW = re.compile(r"^\| ([A-Z]{2}-\d{2}) \| (.+) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    """Id and sentence of each row."""
    return ROW.findall(text_of("docs/reference/requirements.md"))


def markers() -> dict[str, list[str]]:
    """Where each id is named by a marker, on a test or for a whole file."""
    found: dict[str, list[str]] = {}
    for path in files_with_tests():
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "requirement"
            ):
                for identity in ids_in(path, node):
                    found.setdefault(identity, []).append(f"{path}:{node.lineno}")
    return found


def ids_in(path: Path, call: ast.Call) -> list[str]:
    """The ids that a marker names: its text, or those of the comprehension around it."""
    (argument,) = call.args
    if isinstance(argument, ast.Constant):
        return [str(argument.value)]
    for node in nodes_of(path):
        if isinstance(node, ast.ListComp) and any(
            isinstance(part, ast.Call) and ast.dump(part) == ast.dump(call) for part in ast.walk(node.elt)
        ):
            return list(ast.literal_eval(node.generators[0].iter))
    raise AssertionError(f"{path}:{call.lineno}: a marker's id must be a literal")


def test_every_requirement_has_a_test() -> None:
    marked = markers()
    missing = [identity for identity, _ in rows() if identity not in marked]
    assert not missing, f"no test is marked with {', '.join(missing)}"


def test_every_marker_names_a_requirement_of_the_table() -> None:
    known = {identity for identity, _ in rows()}
    unknown = {identity: places for identity, places in markers().items() if identity not in known}
    assert not unknown, unknown


def test_the_table_has_one_row_and_one_sentence_for_each_id_in_order() -> None:
    ids = [identity for identity, _ in rows()]
    assert [identity for identity, times in Counter(ids).items() if times > 1] == []
    assert ids == sorted(ids)
    for identity, sentence in rows():
        assert sentence.endswith("."), identity
        assert sentence.count(". ") == 0, f"{identity}: one sentence"


def test_no_row_is_overlooked_for_its_notation() -> None:
    text = text_of("docs/reference/requirements.md")
    lines = [line for line in text.splitlines() if line.startswith("|") and ID.search(line)]
    assert len(lines) == len(rows()) > 0
