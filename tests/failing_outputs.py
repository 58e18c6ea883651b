"""Programs whose standard output fails: a full disk, a reader that has gone, Ctrl-C in front of a full pipe."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 60
FAILING_OUTPUTS: Final = ("full", "closed", "interrupted")
ASCII_LOCALE: Final = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


def run_with_failing_output(output: str, command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Run a program whose output fails. Return its exit code and what it wrote to standard error.

    `output` is one of `FAILING_OUTPUTS`. The interrupted program must write more than a pipe holds (64 KiB).
    """
    if output == "full":
        with Path("/dev/full").open("wb") as full:
            return _run(command, env, full.fileno())
    reading, writing = os.pipe()
    if output == "closed":
        os.close(reading)
        with os.fdopen(writing, "wb") as closed:
            return _run(command, env, closed.fileno())
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb") as target:
        with subprocess.Popen(command, stdout=target, stderr=subprocess.PIPE, env=env, text=True) as process:
            try:
                assert source.read(1)
                process.send_signal(signal.SIGINT)
                _, complaint = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        return process.returncode, complaint


def _run(command: Sequence[str], env: Mapping[str, str], stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=env, text=True, timeout=TIMEOUT_S, check=False
    )
    return done.returncode, done.stderr
