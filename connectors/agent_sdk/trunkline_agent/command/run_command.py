"""`trunkline-agent run`: a loop around any program, over the agent's mailbox or for one job."""

from __future__ import annotations

import argparse
import shutil
from typing import Any, Final

from trunkline_agent.command.child_program import Limits
from trunkline_agent.command.command_options import add_command, at_least
from trunkline_agent.errors import UsageError
from trunkline_agent.hub.agent_calls import LONGEST_S
from trunkline_agent.wire.durations import duration_s

_HELP: Final = """\
Run a program for each message in the mailbox, or once for a job. No shell reads COMMAND.

  trunkline-agent run -- ./answer.sh             an agent that is a shell script
  trunkline-agent run --input body --reply text -- tr a-z A-Z
  trunkline-agent run --timeout 600 --count 10 -- python work.py
  trunkline-agent run --job -- make all

Mailbox: the program gets the message on stdin, one line of JSON: id, from, type, payload, topic, thread,
in_reply_to, attempt. With '--input body' it gets the payload alone; of {"text": ...} that is the text. What it
writes to stdout is the reply: {"text": ...}, with '--reply json' its JSON. No output is no reply.

  exit code 0            the reply is sent, and the message is acknowledged
  any other exit code    the message is given back, and comes again, up to the gateway's number of attempts
  over a limit           as well; the program gets SIGTERM, and SIGKILL after --grace. One run has an hour,
                         or --timeout

The lease of the message is extended while the program runs. Messages come one after the other; for more at
once start more of these commands. SIGTERM and Ctrl-C end the program first and give its message back. After a
crash a message may come twice, with the same id.

Job ('--job'): `started` at the begin, each line of stdout as `progress`, and at the end `completed` for exit
code 0, else `error`. The program has our stdin. Lines are also printed. The exit code is the program's.
While the hub does not answer, events wait on the disk, and the program waits at its output.

The program's environment has no token and no secret, unless --pass-credentials is given.
"""


def add_to(commands: Any) -> None:
    """Add the subcommand `run`."""
    from trunkline_agent.command.publish_command import add_job_options

    found = add_command(
        commands, "run", _run, "run a program for each message, or for a job", _HELP, takes_command=True
    )
    found.add_argument("--input", choices=("json", "body"), default="json", help="stdin (default: json)")
    found.add_argument(
        "--reply", choices=("text", "json", "none"), default="text", help="stdout (default: text)"
    )
    found.add_argument("--count", type=at_least(1), metavar="N", help="end after so many messages")
    found.add_argument(
        "--wait", type=duration_s, metavar="TIME", help="end when no message came for so long (default: never)"
    )
    found.add_argument(
        "--timeout",
        type=duration_s,
        metavar="TIME",
        help="time for one run; 0: no limit (default: 3600, with --job no limit)",
    )
    found.add_argument(
        "--grace", type=duration_s, default=10.0, metavar="TIME", help="SIGTERM to SIGKILL (default: 10)"
    )
    found.add_argument(
        "--output-limit",
        type=at_least(1),
        default=256 * 1024,
        metavar="BYTES",
        help="of one reply (default: 256 KiB)",
    )
    found.add_argument("--pass-credentials", action="store_true", help="leave secrets in its environment")
    found.add_argument("--job", action="store_true", help="for one job, not for the mailbox")
    add_job_options(found, "--job-id")


def _run(given: argparse.Namespace) -> int:
    if not given.command:
        raise UsageError("which program?", advice="put it behind --, as in: trunkline-agent run -- ./answer.sh")
    if shutil.which(given.command[0]) is None:
        raise UsageError(f"there is no program {given.command[0]!r}")
    if given.timeout is None and not given.job:
        given.timeout = LONGEST_S
    # A run without a limit may hang for ever, which is for the caller to decide.
    limits = Limits(given.timeout or None, given.output_limit, given.grace)
    if given.job:
        from trunkline_agent.command.job_loop import run_for_job

        return run_for_job(given, limits)
    if given.job_id or given.secret_file or given.over or given.state_dir:
        raise UsageError("--job-id, --secret-file, --over and --state-dir belong to --job")
    from trunkline_agent.command.mailbox_loop import run_for_messages

    return run_for_messages(given, limits)
