"""`trunkline-agent publish`: an event of a job. And the options that name a job and the way of its events."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any, Final

from trunkline_agent.command.command_options import (
    add_command,
    credentials_of,
    json_value,
    print_json,
    read_secret,
    read_text,
)
from trunkline_agent.credentials import FILE_VARIABLE
from trunkline_agent.errors import UsageError
from trunkline_agent.jobs.deliveries import environment_broker, environment_doors
from trunkline_agent.jobs.job import JOB_VARIABLE, SECRET_VARIABLE, Job

_EVENTS: Final = {
    "started": "started",
    "progress": "progress",
    "permission-required": "permission_required",
    "completed": "completed",
    "error": "error",
}
_HELP: Final = """\
Publish an event of a job, and print its receipt. The event is signed with the job's secret, and is on the disk
before it is sent: the next command of the same job sends first what this one could not.

examples:
  trunkline-agent publish started
  trunkline-agent publish progress "3 of 7 tests" --data '{"done": 3, "total": 7}'
  make 2>&1 | tail -1 | trunkline-agent publish completed -
  trunkline-agent publish error "out of disk" --job 0a1b2c3d --secret-file job.secret --over mqtt

The job is that of TRUNKLINE_JOB_ID and TRUNKLINE_JOB_SECRET, which './trunkline jobs register' prints.
A `completed` or an `error` ends the job.
"""
HTTP, MQTT = "http", "mqtt"
WAYS: Final = (HTTP, MQTT)


def add_to(commands: Any) -> None:
    """Add the subcommand `publish`."""
    found = add_command(commands, "publish", _run, "publish an event of a job", _HELP)
    found.add_argument("event", choices=_EVENTS, metavar="EVENT", help=", ".join(_EVENTS))
    found.add_argument("text", nargs="?", help="what happened, for people; - reads standard input")
    found.add_argument(
        "--data", metavar="JSON", help="more, for programs: a JSON object; - reads standard input"
    )
    add_job_options(found)


def _run(given: argparse.Namespace) -> int:
    options: dict[str, Any] = {}
    if given.data is not None:
        options["data"] = json_value(given.data, "--data")
    text = "" if given.text is None else read_text(given.text)
    receipt = getattr(job_of(given), _EVENTS[given.event])(text, **options)
    if given.json:
        print_json(asdict(receipt))
    else:
        print(f"{receipt.ce_id} {receipt.verdict}")
    return 0


def add_job_options(found: argparse.ArgumentParser, name: str = "--job") -> None:
    """Add the options of `job_of` to a parser. `name` is the option with the job's id."""
    found.add_argument(name, dest="job_id", metavar="ID", help=f"the job (default: that of {JOB_VARIABLE})")
    found.add_argument(
        "--secret-file", metavar="FILE", help=f"the file with its secret (default: that of {SECRET_VARIABLE})"
    )
    found.add_argument("--over", choices=WAYS, help="how events are sent (default: http)")
    found.add_argument("--state-dir", metavar="FOLDER", help="where events wait until they are confirmed")


def job_of(given: argparse.Namespace) -> Job:
    """Return the job that the options or the environment name. Raises UsageError and NotFound."""
    job_id = given.job_id or os.environ.get(JOB_VARIABLE)
    secret = os.environ.get(SECRET_VARIABLE) if given.secret_file is None else read_secret(given.secret_file)
    if not job_id:
        raise UsageError("which job?", advice=f"set {JOB_VARIABLE}, or name it")
    if not secret:
        raise UsageError(
            f"the secret of job {job_id} is missing", advice=f"set {SECRET_VARIABLE}, or --secret-file"
        )
    return Job(job_id, secret, state_dir=given.state_dir, **_door(given))


def _door(given: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of `Job` for the way of its events."""
    if given.credentials is None and given.over is None:
        return environment_doors(os.environ)
    if given.credentials is None and given.over == MQTT and not os.environ.get(FILE_VARIABLE):
        return {MQTT: environment_broker(os.environ)}
    return {MQTT if given.over == MQTT else "hub": credentials_of(given)}
