"""Runs a program of `jobs` to its end, for commands that need its result."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_REPORT_EVERY_S: Final = 30.0


def run_job(settings: Settings, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of `jobs`, and return its exit code and output. While it runs, a line now and then says so.

    The time that it takes grows with the tables, so there is no time limit. An exception in this process, such
    as that of Ctrl-C, ends the program.

    Args:
        settings: The settings of the program.
        name: The module below `jobs`, such as `rebuild_views`.
        arguments: The arguments of the program.
    """
    from schemas.settings.settings import PROJECT_ROOT, settings_environment

    command = [sys.executable, "-m", f"jobs.{name}", *arguments]
    environment = os.environ | settings_environment(settings)
    began = time.monotonic()
    with subprocess.Popen(  # noqa: S603 ours
        command,
        env=environment,
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    output, errors = process.communicate(timeout=_REPORT_EVERY_S)
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                shown = " ".join((name, *arguments[:1]))
                print(f"  {shown} has run for {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        finally:
            process.kill()
