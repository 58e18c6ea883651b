"""The job loop of `trunkline-agent run --job`: one program whose output becomes the events of a job.

**Delivers** each line at least once, in order, as the job's outbox does. **Acknowledges when** the receipt of
an event confirms it; until then the program waits at its next lines. **Loses** the lines that are not events:
empty ones, and those that look like a secret, of which a note is published.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from trunkline_agent.command.child_program import ChildProgram, Limits, environment_with
from trunkline_agent.command.publish_command import job_of
from trunkline_agent.command.stop_signals import StopSignals
from trunkline_agent.errors import BackboneUnreachable, RateLimited, UsageError
from trunkline_agent.jobs.job import Job

# The longest text of an event.
_TEXT_MOST: Final = 500
_LINE_MOST: Final = 16 * 1024
_EXIT_CODE: Final = "exit_code"


class _Lines:
    """The output of a program, cut into lines; each becomes an event of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rest = b""
        self._is_away = False

    def take(self, piece: bytes) -> None:
        """Publish the lines that a piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._publish(line)
        if len(self._rest) > _LINE_MOST:
            self.end()

    def end(self) -> None:
        """Publish the last line, which has no line break."""
        line, self._rest = self._rest, b""
        if line:
            self._publish(line)

    def _publish(self, line: bytes) -> None:
        text = line[:_LINE_MOST].decode("utf-8", "replace").rstrip("\r")
        print(text, flush=True)
        shown = "".join(c if c.isprintable() else " " for c in text).strip()
        if not shown:
            return
        try:
            self._progress(shown[:_TEXT_MOST])
        except UsageError as error:
            # Such as a text that looks like a password. The reason is shown, and not the text.
            print(f"trunkline-agent: a line was not published: {error}", file=sys.stderr, flush=True)
            self._progress("(a line was not published: it is not allowed in an event)")

    def _progress(self, text: str) -> None:
        try:
            self._job.progress(text)
            self._is_away = False
        except (BackboneUnreachable, RateLimited) as error:
            # The event is in the outbox, and the next one sends it first. The program need not end for it.
            if not self._is_away:
                print(f"trunkline-agent: {error}; events wait on the disk", file=sys.stderr, flush=True)
            self._is_away = True


def run_for_job(given: argparse.Namespace, limits: Limits) -> int:
    """Run the command for a job from `started` to `completed` or `error`, and return its exit code.

    A program that a signal ended gives 1. Raises Stopped after a signal to us, when the program has ended and
    `error` is published, and the errors of the job's events.
    """
    job = job_of(given)
    environment = environment_with({"TRUNKLINE_JOB_ID": job.job_id}, has_secrets=given.pass_credentials)
    with StopSignals() as stop:
        job.started(f"runs {given.command[0]}"[:_TEXT_MOST])
        lines = _Lines(job)
        try:
            program = ChildProgram(given.command, None, limits, environment, lines.take)
        except UsageError as error:
            job.error(str(error)[:_TEXT_MOST])
            raise
        ended = program.run(stop)
        lines.end()
        if ended.is_good:
            job.completed(data={_EXIT_CODE: 0})
        else:
            job.error(ended.fault[:_TEXT_MOST], {_EXIT_CODE: ended.exit_code})
        stop.check()
    return ended.exit_code if ended.exit_code > 0 else int(not ended.is_good)
