"""Runs an audit notebook: in this process, which costs no kernel, or in a true one; and what it put out."""

from __future__ import annotations

import ast
import io
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient

from schemas.settings.settings import PROJECT_ROOT, Settings, settings_environment

NOTEBOOKS = PROJECT_ROOT / "notebooks"
# A cell may start a JVM, on a machine that does other things, too.
KERNEL_CELL_S = 240


@dataclass
class NotebookRun:
    """The output of a notebook, cell by cell, each under its heading.

    `plots` are PNG files; `names` is what its cells have defined.
    """

    texts: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    plots: list[bytes] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All text, with single spaces."""
        return _single_spaced(self.texts)

    def section(self, title: str) -> str:
        """As `text`, of the cells under one heading."""
        found = [text for text, heading in zip(self.texts, self.headings, strict=True) if title in heading]
        assert found, f"no section {title!r}"
        return _single_spaced(found)


def _single_spaced(texts: list[str]) -> str:
    return "\n".join(" ".join(line.split()) for text in texts for line in text.splitlines())


def notebook(name: str) -> nbformat.NotebookNode:
    """A notebook as it is committed."""
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def _show(value: object) -> str:
    return str(value.to_string()) if hasattr(value, "to_string") else repr(value)


def run_here(
    name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, parameters: Mapping[str, object] = {}
) -> NotebookRun:
    """Run a notebook's cells in this process, with `parameters` put after its parameters cell."""
    for variable, value in settings_environment(settings).items():
        monkeypatch.setenv(variable, value)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    run, heading = NotebookRun(names={"__name__": "__main__"}), ""
    for cell in notebook(name).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            heading = cell.source.splitlines()[0]
        if cell.cell_type == "code":
            run.headings.append(heading)
            run.texts.append(_run_cell(cell.source, f"{name}/{cell.id}", run.names))
        if "parameters" in cell.metadata.get("tags", []):
            assert parameters.keys() <= run.names.keys()
            run.names.update(parameters)
        for number in pyplot.get_fignums():
            png = io.BytesIO()
            pyplot.figure(number).savefig(png, dpi=70)
            run.plots.append(png.getvalue())
        pyplot.close("all")
    return run


def _run_cell(source: str, name: str, names: dict[str, Any]) -> str:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as said:
        exec(compile(tree, name, "exec"), names)  # noqa: S102  the notebook is ours
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)  # noqa: S307
            if value is not None:
                print(_show(value))
    return said.getvalue()


def run_in_kernel(name: str, settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> NotebookRun:
    """Run a notebook in a kernel of its own, in its own folder as Jupyter does, with settings alone."""
    for variable, value in settings_environment(settings).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    executed = notebook(name)
    NotebookClient(executed, timeout=KERNEL_CELL_S, kernel_name="python3").execute(cwd=os.fspath(NOTEBOOKS))
    run = NotebookRun()
    for output in (out for cell in executed.cells for out in cell.get("outputs", [])):
        data = output.get("data", {})
        run.texts.append(output.get("text", "") or data.get("text/plain", ""))
        if "image/png" in data:
            run.plots.append(data["image/png"].encode("ascii"))
    return run
