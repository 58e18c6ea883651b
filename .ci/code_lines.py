#!/usr/bin/env python3
"""Counts the lines of code of the product and of its tests: lines without blanks, comments and docstrings.

    .ci/code_lines.py [--rev COMMIT] [--json]

Counts the working tree, or a commit. The product is schemas, connectors (with the dashboard's page), jobs and
the Python files of notebooks.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("schemas", "connectors", "jobs", "notebooks")
PAGE = {".js", ".css", ".html"}
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
PAGE_COMMENT = re.compile(r"/\*.*?\*/|<!--.*?-->|^\s*//[^\n]*", re.DOTALL | re.MULTILINE)


def python_lines(text: str) -> int:
    """Return the number of lines with code; a string that is a statement of its own is a docstring."""
    documents: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            documents.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documents)


def page_lines(text: str) -> int:
    """Return the number of lines of a script, style sheet or page that are neither blank nor comments."""
    return sum(bool(line.strip()) for line in PAGE_COMMENT.sub("", text).splitlines())


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout  # noqa: S603


def files(rev: str | None) -> dict[Path, str]:
    """Return the files that count, with their texts."""
    if rev is None:
        listed = git("ls-files", "--cached", "--others", "--exclude-standard")
    else:
        listed = git("ls-tree", "-r", "--name-only", rev)
    paths = [Path(name) for name in listed.splitlines()]
    kept = [p for p in paths if p.parts[0] in {*PRODUCT, "tests"} and p.suffix in {".py", *PAGE}]
    if rev is None:
        return {p: (ROOT / p).read_text(encoding="utf-8") for p in kept if (ROOT / p).is_file()}
    return {p: git("show", f"{rev}:{p}") for p in kept}


def main() -> None:
    """Print lines, modules and small modules, of product and tests and by folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rev", help="count this commit instead of the working tree")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    folders: Counter[str] = Counter()
    modules = small = row_checks = 0
    for path, text in files(args.rev).items():
        is_python = path.suffix == ".py"
        folder = "/".join(path.parts[:-1][:3])
        if "test" in path.parts:  # of the JavaScript library, whose tests are beside it
            folder = f"tests/{folder}"
        folders[folder] += python_lines(text) if is_python else page_lines(text)
        if is_python and path.parts[0] in PRODUCT and path.name != "__init__.py":
            modules += 1
            small += len(text.splitlines()) < 55
            row_checks += len(re.findall(r"isinstance\([^()]*(?:\([^()]*\))?[^()]*Row\)", text))
    product = sum(n for folder, n in folders.items() if not folder.startswith("tests"))
    found = {
        "product_lines": product,
        "test_lines": folders.total() - product,
        "product_modules": modules,
        "modules_under_55_lines": small,
        "isinstance_on_rows": row_checks,
    }
    if args.json:
        print(json.dumps({**found, "folders": dict(sorted(folders.items()))}))
        return
    for name, count in {**dict(sorted(folders.items())), **found}.items():
        print(f"{count:7,}  {name}")


if __name__ == "__main__":
    main()
