"""`trunkline-agent publish`: an event of a job."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, Final

from trunkline_agent.command.command_options import add_command, json_value, print_json, read_text
from trunkline_agent.command.job_options import add_job_options, job_of

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
