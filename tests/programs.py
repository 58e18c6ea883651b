"""Programs that only tests need: found, or installed by the wrapper when the first test asks for one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from schemas.settings.settings import PROJECT_ROOT

INSTALL_S = 240


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
