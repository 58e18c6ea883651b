"""`trunkline jobs submit`: let an agent do a job in a session of its own, and wait for its end (JE-24)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from connectors.cli.shared.broker_options import read_broker
from connectors.cli.shared.call import Call
from connectors.cli.shared.files import STANDARD_INPUT
from connectors.cli.shared.text_table import print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.job_tools.job_submission import Submission, submit_job
from connectors.processes.session_host import GRACE_S, OWN_END_S, SessionHost
from connectors.terminal.terminal_text import escaped
from schemas.errors import TrunklineError, UsageError
from schemas.streams.job.job_registry import JOB_TERMINAL

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

EXIT_FAILED: Final = 1
EXIT_TIMED_OUT: Final = 2
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


def submit(call: Call) -> int:
    """Submit, show the job's events and return `watch`'s exit code. Raises TrunklineError."""
    if not call.command:
        raise UsageError(
            "give the agent's command behind '--', e.g. … -- python -m connectors.samples.sample_agent"
        )
    if call.to is not None and call.to.exists():
        raise UsageError(f"--to: {call.to} exists already; it is not overwritten")
    if call.instructions == call.broker_file == STANDARD_INPUT:
        raise UsageError("--instructions and --broker-file cannot both read standard input")
    broker = read_broker(call)
    instructions = _read_instructions(call.instructions)
    host = SessionHost(call.settings)
    with call.gateway() as gateway:
        submission = submit_job(
            call.settings,
            gateway,
            host,
            call.description,
            call.session,
            call.command,
            broker=broker,
            instructions=instructions,
            has_header=not call.bare_instructions,
            watch_arguments=_watch_arguments(call),
        )
        say(f"job {submission.job_id} runs in session {submission.session} ({submission.handle})")
        try:
            code = _wait(submission, host)
        except KeyboardInterrupt:
            submission.end_subscriber()
            _explain_how_to_go_on(submission)
            return EXIT_INTERRUPTED
        finally:
            submission.end_subscriber()
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


def _wait(submission: Submission, host: SessionHost) -> int:
    """Show events until the subscriber ends. Return its exit code, or 1 if the agent sent no end event."""
    silent_since: float | None = None
    with submission.output.open("rb") as lines:
        while (code := submission.subscriber.poll()) is None:
            _show_new(lines)
            if host.alive(submission.handle):
                silent_since = None
            elif silent_since is None:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > _SILENT_END_S:
                _explain_silent_end(submission, host)
                return EXIT_FAILED
            time.sleep(_TICK_S)
        _show_new(lines)
    return code


def _show_new(lines: IO[bytes]) -> None:
    while line := lines.readline():
        if not line.endswith(b"\n"):
            # The line is not complete yet; it is read again the next time.
            lines.seek(-len(line), 1)
            return
        event: dict[str, Any] = json.loads(line)
        say(f"  {event.get('seq'):>4}  {event.get('event')}  {event.get('detail')}")


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
    from connectors.ledger_files.ledger_export import export_job, ledger_status
    from connectors.ledger_files.ledger_reader import LedgerReader

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


def _watch_arguments(call: Call) -> list[str]:
    options = {"--timeout": call.timeout, "--idle-timeout": call.idle_timeout}
    return [word for name, value in options.items() if value is not None for word in (name, f"{value:f}")]


def _read_instructions(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--instructions: cannot read {name}: {type(error).__name__}") from None
