"""Programs in tests: run to their end; those that only tests need are installed when the first asks for one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.settings.settings import PROJECT_ROOT

INSTALL_S = 240


def run_program(
    command: Sequence[str | Path], timeout_s: float = 60, cwd: Path = PROJECT_ROOT, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with its output as text; `options` are those of `subprocess.run`."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, **options)


def start_program(
    command: Sequence[str | Path], cwd: Path = PROJECT_ROOT, **options: Any
) -> subprocess.Popen[str]:
    """Start a program whose output is read as text; `options` are those of `subprocess.Popen`."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, **options)


def required_program(package: str, *names: str) -> str:
    """The path of the first program of these names. Debian's `package` is installed where there is none."""
    for _ in range(2):
        found = next(filter(None, map(shutil.which, names)), None)
        if found is not None:
            return found
        command = [PROJECT_ROOT / "trunkline", "install-for-tests", package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            break
    pytest.fail(f"none of {', '.join(names)} is here, and it could not be installed: {done.stderr}")
