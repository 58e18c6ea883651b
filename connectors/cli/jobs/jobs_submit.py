"""`trunkline jobs submit`: let an agent do a job in a session of its own, and wait for its end (JE-24).

It registers the job, makes the session, follows the gateway's events and then starts the agent, so it misses no
event. The agent gets its environment, with the job's secret, by the 0600 spec file of the session.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from connectors.cli.jobs.watch_sources import NextSights, settled_source, watch
from connectors.cli.shared.arguments import STANDARD_INPUT, read_broker
from connectors.cli.shared.call import Call
from connectors.cli.shared.text_output import print_json
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.machine.process_tree import clean_environment
from connectors.programs.processes.session_host import GRACE_S, OWN_END_S, SessionHost
from connectors.programs.processes.session_registry_client import create_session, refuse_taken
from connectors.tools.job_tools.job_files import secret_path, store_broker, store_secret
from connectors.tools.job_tools.job_watcher import EXIT_FAILED, EXIT_TIMED_OUT, Outcomes, Timers
from schemas.settings.settings import PROJECT_ROOT, Settings, settings_environment
from schemas.streams.job.job_registry import JOB_TERMINAL
from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.jobs.job import JOB_VARIABLE, SECRET_VARIABLE
from trunkline_agent.terminal_text import escaped

EXIT_INTERRUPTED: Final = 130
_TICK_S: Final = 0.1
# The time that an agent's last event may need after its command has ended.
_SILENT_END_S: Final = 10.0
_LEDGER_S: Final = 20.0
_LEDGER_POLL_S: Final = 0.5
_WORDS: Final = {0: "completed", 1: "failed or was cancelled", 2: "had not ended when the time ran out"}


def say(text: str) -> None:
    """Print one line of progress on stderr."""
    print(escaped(text), file=sys.stderr, flush=True)


@dataclass
class Submission:
    """A job that an agent works on in a session of its own.

    Attributes:
        job_id: The job.
        session: The name of the session.
        handle: The id of one start of the session's process, from the session's row. `SessionHost` finds the
            process by it.
        folder: The folder for the job's files on this machine.
        next_sights: The source of reports about the job's events.
        outcomes: The record of how the job ends.
    """

    job_id: str
    session: str
    handle: str
    folder: Path
    next_sights: NextSights = field(repr=False)
    outcomes: Outcomes = field(repr=False)

    @property
    def output(self) -> Path:
        """The path of the file with the accepted events of the job, as lines of JSON."""
        return self.folder / f"{self.job_id}.subscriber.out"


class _SilentEnd(Exception):
    """The agent's process has ended, and no end event came."""


def submit(call: Call) -> int:
    """Run `trunkline jobs submit`: start an agent for a new job, and show the job's events until its end.

    It blocks until then. `call` has the parsed arguments of the command line.

    Returns:
        0 if the job completed. 1 if it failed, was cancelled, or the agent's process ended without an end
        event. 2 after a time limit and 130 after Ctrl-C; then the agent goes on.

    Raises:
        TrunklineError: The job could not be started. If it was registered, it is cancelled then.
    """
    if not call.command:
        raise UsageError(
            "give the agent's command behind '--', e.g. … -- python -m connectors.tools.samples.sample_agent"
        )
    if call.to is not None and call.to.exists():
        raise UsageError(f"--to: {call.to} exists already; it is not overwritten")
    if call.instructions == call.broker_file == STANDARD_INPUT:
        raise UsageError("--instructions and --broker-file cannot both read standard input")
    broker = read_broker(call)
    instructions = _read_instructions(call.instructions)
    host = SessionHost(call.settings)
    with call.gateway() as gateway, ExitStack() as following:
        submission = _start(call, gateway, host, broker, instructions, following)
        say(f"job {submission.job_id} runs in session {submission.session} ({submission.handle})")
        try:
            code = _wait(submission, host, Timers(call.timeout, call.idle_timeout))
        except KeyboardInterrupt:
            _explain_how_to_go_on(submission)
            return EXIT_INTERRUPTED
        status = _close(submission, gateway, host)
    say(f"job {submission.job_id} {_WORDS.get(code, f'is not followed any more (exit code {code})')}")
    if code == EXIT_TIMED_OUT and status not in JOB_TERMINAL:
        _explain_how_to_go_on(submission)
    audit = _export(call.settings, submission, call.to, status)
    if call.json:
        print_json(
            {
                "job_id": submission.job_id,
                "session": submission.session,
                "status": status,
                "exit_code": code,
                "subscriber_out": str(submission.output),
                "audit": None if audit is None else str(audit),
            }
        )
    return code


def _start(
    call: Call,
    gateway: GatewayClient,
    host: SessionHost,
    broker: dict[str, Any] | None,
    instructions: str | None,
    following: ExitStack,
) -> Submission:
    """Register a job, follow its events until `following` ends, and start its agent.

    `broker` is the job's own, with its password; the agent finds it next to the secret. After an error the job,
    if it was registered, is cancelled with the reason, and nothing is left running.
    """
    settings, session = call.settings, call.session
    refuse_taken(gateway, session)
    wanted = {"description": call.description, "session": session, "broker": broker}
    job = gateway.post(path_of("jobs"), wanted)
    job_id, secret = str(job["job_id"]), str(job["secret"])
    handle: str | None = None
    try:
        store_broker(secret_path(settings, job_id), job_id, broker)
        store_secret(settings, job_id, secret)
        if instructions is not None and not call.bare_instructions:
            instructions = _instruction_header(job_id, session) + instructions
        row = create_session(
            gateway,
            host,
            session,
            call.command,
            for_job=job_id,
            description=f"for job {job_id}",
            environment=_agent_environment(settings, job_id, secret, session),
            instructions=instructions,
        )
        handle = str(row["handle"])
        # Not a pick: a pick gives the session the oldest job that fits, which may be another one.
        gateway.post(path_of("jobs", job_id, "assign"), {"session": session})
        folder = settings.data_path / "jobs" / job_id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        outcomes = Outcomes([job_id])
        next_sights = following.enter_context(settled_source(settings, [job_id], outcomes))
        host.release(session, handle)
        return Submission(job_id, session, handle, folder, next_sights, outcomes)
    except BaseException as error:
        if handle is not None:
            host.stop(handle)
        _give_up(gateway, job_id, error)
        raise


def _agent_environment(settings: Settings, job_id: str, secret: str, session: str) -> dict[str, str]:
    """Return the environment of an agent's command: ours without our secrets, the settings, and the job.

    The settings are without the master key. They keep the broker's user and password, if they name them,
    because the agent publishes with them (JE-13).
    """
    known = settings_environment(settings.model_copy(update={"master_key": None}))
    job = {
        JOB_VARIABLE: job_id,
        SECRET_VARIABLE: secret,
        "TRUNKLINE_SESSION": session,
    }
    conf = {name: os.environ[name] for name in ("TRUNKLINE_CONF",) if os.environ.get(name)}
    return {**clean_environment(), **conf, **known, **job}


def _instruction_header(job_id: str, session: str) -> str:
    """Return comment lines for an agent, with the commands that report on its job.

    The commands find the job's secret in the agent's environment.
    """
    program = shlex.quote(str(PROJECT_ROOT / "trunkline"))
    publish = f"{program} publish --job {job_id} --event"
    return (
        f"# You work on job {job_id} in session {session}. Report what you do with these commands, in this\n"
        "# order; the environment variable TRUNKLINE_JOB_SECRET signs what they send:\n"
        f'#   {publish} started --detail "what begins"\n'
        f'#   {publish} progress --detail "what is done so far"\n'
        f'#   {publish} completed --detail "what came of it"\n'
        "# Publish 'progress' as often as you like, 'permission_required' to ask for a permission, 'error'\n"
        "# instead of 'completed' when the work has failed. The last event ends the job and this session.\n"
        "# A detail has at most 500 characters and holds no file path, no NAME=value, no password or token.\n"
        "# Your instructions:\n"
    )


def _give_up(gateway: GatewayClient, job_id: str, error: BaseException) -> None:
    """Try to cancel a job that could not be started. Errors are only printed: the first one counts."""
    try:
        why = {"reason": f"submit failed: {type(error).__name__}"}
        gateway.post(path_of("jobs", job_id, "cancel"), why)
        say(f"trunkline jobs: job {job_id} is cancelled, it could not be started")
    except TrunklineError:
        say(f"trunkline jobs: job {job_id} is still registered: trunkline jobs cancel {job_id}")


def _wait(submission: Submission, host: SessionHost, timers: Timers) -> int:
    """Show and store events until the job's end or a time limit. Return the exit code of the command."""
    silent_since: float | None = None

    def look() -> None:
        nonlocal silent_since
        if host.alive(submission.handle):
            silent_since = None
        elif silent_since is None:
            silent_since = time.monotonic()
        elif time.monotonic() - silent_since > _SILENT_END_S:
            raise _SilentEnd

    with submission.output.open("w", encoding="ascii") as lines:

        def show(line: str) -> None:
            print(line, file=lines, flush=True)
            event: dict[str, Any] = json.loads(line)
            say(f"  {event.get('seq'):>4}  {event.get('event')}  {event.get('detail')}")

        try:
            return watch(submission.next_sights, submission.outcomes, timers, show, look)
        except _SilentEnd:
            _explain_silent_end(submission, host)
            return EXIT_FAILED
        except TrunklineError as error:
            say(f"job {submission.job_id} cannot be followed: {error}")
            return error.exit_code


def _explain_silent_end(submission: Submission, host: SessionHost) -> None:
    end = host.end_of(submission.session, submission.handle)
    how = "was killed" if end is None else f"ended with exit code {end.exit_code}"
    screen = host.capture(submission.session, None).strip().splitlines()[-5:]
    job = submission.job_id
    say(f"the agent's command {how} without an end event of job {job}. Its last lines:")
    for line in screen:
        say(f"  | {line}")
    say(f"The job is still open. End it: trunkline jobs cancel {job} --reason '…', or trunkline monitor --mend")


def _explain_how_to_go_on(submission: Submission) -> None:
    job = submission.job_id
    say(f"job {job} goes on in session {submission.session}; nothing was cancelled.")
    say(f"  follow it:  trunkline watch --job {job} --settled")
    say(f"  cancel it:  trunkline jobs cancel {job} --reason '…'")
    say(f"  end its session:  trunkline sessions stop {submission.session} --mode hard")
    say(f"  its events so far are in {submission.output}")


def _close(submission: Submission, gateway: GatewayClient, host: SessionHost) -> str | None:
    """Return the job's state. If the job has ended, end its session, which may have ended by itself."""
    try:
        row = gateway.get(path_of("jobs", submission.job_id))
    except TrunklineError as error:
        say(f"the job's state is not known: {error}")
        return None
    if row["status"] in JOB_TERMINAL:
        deadline = time.monotonic() + OWN_END_S
        while host.alive(submission.handle) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        host.stop(submission.handle, grace_s=GRACE_S)
        host.forget(submission.session)
    return str(row["status"])


def _export(settings: Settings, submission: Submission, to: Path | None, status: str | None) -> Path | None:
    """Write the audit files once the ledger has the whole job, and print where they are or how to get them."""
    from connectors.log.ledger_files.ledger_export import export_job, ledger_status
    from connectors.log.ledger_files.ledger_reader import LedgerReader

    say(f"its events are in {submission.output}")
    folder = submission.folder / "audit" if to is None else to
    later = f"trunkline jobs export {submission.job_id} --to {folder}"
    if status not in JOB_TERMINAL:
        say(f"the audit files, when the job has ended: {later}")
        return None
    deadline = time.monotonic() + _LEDGER_S
    try:
        while ledger_status(settings, submission.job_id) not in JOB_TERMINAL:
            if time.monotonic() > deadline or not LedgerReader(settings).exists():
                say(f"the ledger has not all of it yet; the audit files: {later}")
                return None
            time.sleep(_LEDGER_POLL_S)
        export_job(settings, submission.job_id, folder)
    except TrunklineError as error:
        say(f"the audit files were not written ({error}); later: {later}")
        return None
    say(f"the audit files are in {folder}")
    return folder


def _read_instructions(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--instructions: cannot read {name}: {type(error).__name__}") from None
