"""The project's own files as the tests of its form read them: each file is read and parsed once a worker."""

from __future__ import annotations

import ast
import gc
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def project_files() -> tuple[Path, ...]:
    """All files of the project: what git has or would add, so no build products."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    names = sorted(name for name in listed.stdout.split("\0") if name)
    return tuple(Path(name) for name in names if (ROOT / name).is_file())


def python_files(*folders: str) -> list[Path]:
    """The Python files below these folders, relative to the checkout."""
    return [p for p in project_files() if p.suffix == ".py" and (not folders or p.parts[0] in folders)]


def files_with_tests() -> list[Path]:
    """The files with tests, relative to the checkout."""
    return [path for path in python_files("tests") if path.name.startswith("test_")]


@cache
def text_of(path: Path | str) -> str:
    """The text of a file."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    # The nodes stay until the end, and Python's garbage collector would look at all of them again and again.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text_of(path), str(path))
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))
