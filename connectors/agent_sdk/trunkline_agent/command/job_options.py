"""The options that name a job, its secret and the way of its events."""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

from trunkline_agent.command.command_options import credentials_of, read_secret
from trunkline_agent.credentials import FILE_VARIABLE
from trunkline_agent.errors import UsageError
from trunkline_agent.jobs.deliveries import environment_broker, environment_doors
from trunkline_agent.jobs.job import JOB_VARIABLE, SECRET_VARIABLE, Job

HTTP, MQTT = "http", "mqtt"
WAYS: Final = (HTTP, MQTT)


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
