"""A small agent that publishes its job's events over MQTT: `python -m connectors.tools.samples.sample_agent`.

It is for experiments and for the tests. It reads its instructions from standard input, one per line. It gets
job and secret from TRUNKLINE_JOB_ID and TRUNKLINE_JOB_SECRET, which `trunkline jobs submit` sets. It finds the
job's own broker, if there is one, where that command stores it.

    progress reading the sources
    permission publish the report
    wait 0.5
    fail the last check is red

`wait` takes seconds. `fail` ends the job in error, and `quit` ends the agent without ending the job; otherwise
the job completes. A line that begins with `#` is a comment. Any other line counts as progress.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

from connectors.tools.job_tools.job_files import with_job_broker
from schemas.settings.settings import load_settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.jobs.job import JOB_VARIABLE, Job
from trunkline_agent.private_files import keep_files_private


def work(job: Job, instructions: Iterable[str]) -> None:
    """Publish a job's events: `started`, the events of the instructions, and `completed` or `error`.

    Each instruction is a line of text: `progress TEXT`, `permission TEXT`, `wait SECONDS`, `fail TEXT` or
    `quit`. Any other line is a progress event. Returns after `fail`, which ends the job in error, and after
    `quit`, which publishes no last event. Raises TrunklineError when an event cannot be delivered, and
    ValueError for a `wait` without a number.
    """
    job.started("the sample agent begins")
    done = 0
    for line in instructions:
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        print(f"> {line.strip()}", flush=True)
        if word == "wait":
            time.sleep(float(rest))
        elif word == "quit":
            return
        elif word == "fail":
            job.error(rest or "told to fail")
            return
        elif word == "permission":
            job.permission_required(rest or "go on")
        else:
            done += 1
            job.progress(rest if word == "progress" else line.strip(), {"done": done})
    job.completed(f"{done} steps done")


def main() -> int:
    """Work on the job that environment variables name, and return the exit code of the process.

    TRUNKLINE_JOB_ID and TRUNKLINE_JOB_SECRET name the job. Standard input has the instructions, one per line.
    The code is 0 when the instructions were carried out, also after `fail` and `quit`. After an error, which is
    printed to standard error, it is the error's own code.
    """
    try:
        settings = load_settings()
        job_id = os.environ.get(JOB_VARIABLE)
        own = with_job_broker(settings, job_id) if job_id else settings
        work(Job.from_environment(mqtt=own.mqtt, state_dir=settings.data_path / "publisher"), sys.stdin)
    except TrunklineError as error:
        print(f"sample agent: {error}", file=sys.stderr)
        return error.exit_code
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
