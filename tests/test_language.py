"""Plain English: no sentence of a docstring, a comment or a page opens with a relative clause."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_files import nodes_of, project_files, python_files, text_of
from tests.test_architecture import offenders

# "What is told ..." makes the reader wait for the subject. Name it: "The gateway returns ...".
OPENING = re.compile(
    r"(?:^|(?<=[.!?:;]\s)|(?<=\|\s)|(?<=^[-*]\s)|(?<=^#\s)|(?<=^##\s)|(?<=^###\s))"
    r"(?:What|Who|Whoever|Whatever|Those)\b(?P<rest>[^.?!|]*[.?!|]?)",
    re.MULTILINE,
)
# A cheap look first: few files have a comment with such a word.
OPENING_COMMENT = re.compile(r"#.*\b(?:What|Who|Whoever|Whatever|Those)\b")
CODE = re.compile(r"```.*?```|`[^`\n]*`|^ {4}.*$|<!--.*?-->", re.DOTALL | re.MULTILINE)


def openings(text: str) -> Iterator[str]:
    """Each sentence that opens so; a question may. Only a parameter may be described by "Whether"."""
    if text.startswith("Whether "):
        yield text[:60]
    yield from (found[0][:60] for found in OPENING.finditer(text) if not found["rest"].endswith("?"))


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a Python file, with their lines; comments in a row are one text."""
    source = text_of(path)
    for node in nodes_of(path):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if type(node.value.value) is str:
            yield node.lineno, re.sub(r"[ \t]*\n[ \t]*(?=\S)", " ", node.value.value)
    if not OPENING_COMMENT.search(source):
        return
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 and block:
                yield last, " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    if block:
        yield last, " ".join(block)


@pytest.mark.long
@pytest.mark.requirement("HO-13")
def test_no_docstring_and_no_comment_opens_with_a_relative_clause() -> None:
    offenders(
        f"{path}:{line} {found}"
        for path in python_files()
        for line, text in texts_of(path)
        for found in openings(text)
    )


@pytest.mark.requirement("HO-13")
def test_no_sentence_of_the_docs_opens_with_a_relative_clause() -> None:
    pages = [p for p in project_files() if p.suffix == ".md"]
    offenders(f"{path}: {found}" for path in pages for found in openings(CODE.sub("`code`", text_of(path))))
