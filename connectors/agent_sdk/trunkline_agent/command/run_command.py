"""`trunkline-agent run`: a loop around any program, over the agent's mailbox or for one job.

Over the mailbox it **delivers** each message to a program at least once: the message comes again when it was
given back, or when this process died. It **acknowledges when** the program ended with exit code 0 and its reply
is stored. It **loses** no message.

For a job it **delivers** each line of the program's output at least once, in order, as the job's outbox does.
It **acknowledges when** the receipt of an event confirms it; until then the program waits at its next lines. It
**loses** the lines that are not events: empty ones, and those that look like a secret, of which a note is
published.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any, Final

from trunkline_agent.agent import Agent
from trunkline_agent.command.child_program import ChildProgram, Ended, Limits, environment_with
from trunkline_agent.command.command_options import add_command, at_least, credentials_of, print_json
from trunkline_agent.command.message_commands import as_json, body_of
from trunkline_agent.command.publish_command import add_job_options, job_of
from trunkline_agent.command.stop_signals import StopSignals
from trunkline_agent.errors import (
    BackboneUnreachable,
    LeaseLost,
    MessageRejected,
    NotFound,
    RateLimited,
    UsageError,
)
from trunkline_agent.hub.agent_plans import LONGEST_S
from trunkline_agent.jobs.job import Job
from trunkline_agent.message import Message
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import duration_s

# The longest text of an event.
_TEXT_MOST: Final = 500
_LINE_MOST: Final = 16 * 1024
_EXIT_CODE: Final = "exit_code"
_AWAY_S: Final = 1.0
_MARGIN_S: Final = 60.0
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


def _run_for_job(given: argparse.Namespace, limits: Limits) -> int:
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


def run_for_messages(given: argparse.Namespace, limits: Limits) -> int:
    """Run the command for each message until `--count`, `--wait` or a signal ends the loop.

    While the hub does not answer, it goes on asking. Returns the exit code. Raises Stopped after a signal, when
    the program has ended and its message is given back, and the errors of the mailbox.
    """
    done = 0
    with StopSignals() as stop, Agent(None, credentials_of(given)) as agent:
        while given.count is None or done < given.count:
            message = _next(agent, given.wait, _longest_s(limits), stop)
            if message is None:
                break
            _handle(message, given, limits, stop)
            done += 1
            stop.check()
    return 0


def _longest_s(limits: Limits) -> float | None:
    """Return how long the lease is extended: the program is ended by its own limit before."""
    return None if limits.time_s is None else limits.time_s + limits.grace_s + _MARGIN_S


def _next(agent: Agent, wait_s: float | None, longest_s: float | None, stop: StopSignals) -> Message | None:
    """Wait for the next message, and return it. None: none came within `wait_s`. A signal ends the wait."""
    is_away = False
    with stop.waiting():
        while True:
            try:
                return agent.receive(wait_s=wait_s, longest_s=longest_s)
            except BackboneUnreachable as error:
                if not is_away:
                    _note(f"{error}; it is asked again and again")
                is_away = True
                time.sleep(_AWAY_S)


def _handle(message: Message, given: argparse.Namespace, limits: Limits, stop: StopSignals) -> None:
    """Run the program for one message, and acknowledge the message or give it back."""
    fault = ""
    try:
        with message:
            ended = _ended(message, given, limits, stop)
            fault = ended.fault or _reply(message, given, ended.output)
            if fault:
                message.nack(fault)
    except (LeaseLost, MessageRejected, NotFound) as error:
        # Another consumer has it, or its sender cannot be answered. There are further messages.
        fault = str(error)
    if given.json:
        shown = {"id": message.id, "from": message.sender, "type": message.type, "fault": fault or None}
        print_json(shown)
    elif fault:
        _note(f"message {message.id} from {message.sender}: {fault}")


def _note(text: str) -> None:
    print(f"trunkline-agent: {escaped(text)}", file=sys.stderr, flush=True)


def _ended(message: Message, given: argparse.Namespace, limits: Limits, stop: StopSignals) -> Ended:
    """Run the program to its end."""
    if given.input == "body":
        stdin = body_of(message.payload)
    else:
        stdin = json.dumps(as_json(message), ensure_ascii=False) + "\n"
    values = {
        "TRUNKLINE_MESSAGE_ID": message.id,
        "TRUNKLINE_MESSAGE_FROM": message.sender,
        "TRUNKLINE_MESSAGE_TYPE": message.type,
        "TRUNKLINE_MESSAGE_THREAD": message.thread,
    }
    environment = environment_with(values, has_secrets=given.pass_credentials)
    # A lone surrogate, which JSON can carry, is no UTF-8.
    data = stdin.encode("utf-8", "replace")
    return ChildProgram(given.command, data, limits, environment).run(stop)


def _reply(message: Message, given: argparse.Namespace, output: bytes) -> str:
    """Send the program's output as the reply. Return what is wrong with it, or an empty text."""
    if given.reply == "none" or not output.strip():
        return ""
    try:
        text = output.decode("utf-8")
        payload = json.loads(text) if given.reply == "json" else {"text": text.removesuffix("\n")}
    except (ValueError, RecursionError):
        return "its output is no JSON" if given.reply == "json" else "its output is no UTF-8"
    message.reply(payload)
    return ""


def add_to(commands: Any) -> None:
    """Add the subcommand `run`."""
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
        return _run_for_job(given, limits)
    if given.job_id or given.secret_file or given.over or given.state_dir:
        raise UsageError("--job-id, --secret-file, --over and --state-dir belong to --job")
    return run_for_messages(given, limits)
