"""Submission of work to an agent (JE-24): the registration, a session, a subscriber, and then the agent.

The subscriber is ready before the agent's command begins, so it misses no event. The agent gets its
environment, with the job's secret, through the session's 0600 spec file.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.job_tools.job_brokers import store_broker
from connectors.job_tools.job_secrets import secret_path, store_secret
from connectors.processes.process_tree import clean_environment
from connectors.processes.session_host import SessionHost
from connectors.processes.session_registry_client import create_session, refuse_taken
from schemas.errors import TrunklineError
from schemas.settings.settings import PROJECT_ROOT, Settings, settings_environment

READY_S: Final = 30.0
_TICK_S: Final = 0.05
_STOP_S: Final = 5.0


@dataclass
class Submission:
    """A job that an agent works on in a session of its own, and the subscriber that follows it."""

    job_id: str
    session: str
    handle: str
    folder: Path
    subscriber: subprocess.Popen[bytes] = field(repr=False)

    @property
    def output(self) -> Path:
        """The accepted events, one JSON line each, as the subscriber writes them."""
        return self.folder / f"{self.job_id}.subscriber.out"

    def end_subscriber(self) -> None:
        """Stop the subscriber if it still runs."""
        if self.subscriber.poll() is None:
            self.subscriber.terminate()
            try:
                self.subscriber.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.subscriber.kill()
                self.subscriber.wait(_STOP_S)


def submit_job(
    settings: Settings,
    gateway: GatewayClient,
    host: SessionHost,
    description: str,
    session: str,
    command: list[str],
    *,
    broker: Mapping[str, Any] | None = None,
    instructions: str | None,
    has_header: bool,
    watch_arguments: list[str],
) -> Submission:
    """Register a job and start its subscriber and its agent.

    After an error the job, if it was registered, is cancelled with the reason, and nothing is left running.

    Args:
        settings: of this machine.
        gateway: registers the job and assigns it.
        host: runs the session.
        description: of the job.
        session: the name of the new session.
        command: the agent's command.
        broker: the job's own broker with its password, if it has one. The agent finds it next to the secret.
        instructions: the agent's input, None for none.
        has_header: write `instruction_header` before the instructions.
        watch_arguments: more arguments of the subscriber's `watch` command.

    Raises:
        TrunklineError: the job could not be started.
    """
    refuse_taken(gateway, session)
    job = gateway.post(path_of("jobs"), {"description": description, "session": session, "broker": broker})
    job_id, secret = str(job["job_id"]), str(job["secret"])
    handle: str | None = None
    subscriber: subprocess.Popen[bytes] | None = None
    try:
        store_broker(secret_path(settings, job_id), job_id, broker)
        store_secret(settings, job_id, secret)
        if instructions is not None and has_header:
            instructions = instruction_header(job_id, session) + instructions
        row = create_session(
            gateway,
            host,
            session,
            command,
            for_job=job_id,
            description=f"for job {job_id}",
            environment=agent_environment(settings, job_id, secret, session),
            instructions=instructions,
        )
        handle = str(row["handle"])
        # Not a pick: a pick gives the session the oldest job that fits, which may be another one.
        gateway.post(path_of("jobs", job_id, "assign"), {"session": session})
        folder = settings.data_path / "jobs" / job_id
        subscriber = _start_subscriber(settings, job_id, folder, watch_arguments)
        host.release(session, handle)
        return Submission(job_id, session, handle, folder, subscriber)
    except BaseException as error:
        if subscriber is not None:
            subscriber.kill()
            subscriber.wait(_STOP_S)
        if handle is not None:
            host.stop(handle)
        _give_up(gateway, job_id, error)
        raise


def agent_environment(settings: Settings, job_id: str, secret: str, session: str) -> dict[str, str]:
    """Return the environment of an agent's command: ours without our secrets, the settings, and the job.

    The settings are without the master key. They keep the broker's user and password, if they name them,
    because the agent publishes with them (JE-13).
    """
    known = settings_environment(settings.model_copy(update={"master_key": None}))
    job = {
        "TRUNKLINE_JOB_ID": job_id,
        "TRUNKLINE_JOB_SECRET": secret,
        "TRUNKLINE_SESSION": session,
    }
    conf = {name: os.environ[name] for name in ("TRUNKLINE_CONF",) if os.environ.get(name)}
    return {**clean_environment(), **conf, **known, **job}


def instruction_header(job_id: str, session: str) -> str:
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


def _start_subscriber(
    settings: Settings, job_id: str, folder: Path, arguments: list[str]
) -> subprocess.Popen[bytes]:
    """Start `watch --settled` on the job and wait until it receives all events."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ready = folder / f".ready.{os.getpid()}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRUNKLINE__")},
        **settings_environment(settings),
        "TRUNKLINE_READY_FILE": str(ready),
    }
    command = [sys.executable, "-m", "connectors.cli", "watch", "--job", job_id, "--settled", *arguments]
    errors = folder / f"{job_id}.subscriber.err"
    with (folder / f"{job_id}.subscriber.out").open("wb") as out, errors.open("wb") as err:
        # In a process group of its own: on Ctrl-C this process stops it in order.
        subscriber = subprocess.Popen(  # noqa: S603  the command is ours
            command,
            cwd=PROJECT_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            if subscriber.poll() is not None or time.monotonic() > deadline:
                output = errors.read_text(encoding="utf-8", errors="replace").strip()[-500:]
                raise TrunklineError(f"the subscriber does not follow job {job_id}: {output or 'no answer'}")
            time.sleep(_TICK_S)
    except BaseException:
        subscriber.kill()
        subscriber.wait(_STOP_S)
        raise
    finally:
        ready.unlink(missing_ok=True)
    return subscriber


def _give_up(gateway: GatewayClient, job_id: str, error: BaseException) -> None:
    """Try to cancel a job that could not be started. Errors are only printed: the first one counts."""
    try:
        reason = f"submit failed: {type(error).__name__}"
        gateway.post(path_of("jobs", job_id, "cancel"), {"reason": reason})
        print(f"trunkline jobs: job {job_id} is cancelled, it could not be started", file=sys.stderr)
    except TrunklineError:
        text = f"job {job_id} is still registered: trunkline jobs cancel {job_id}"
        print(f"trunkline jobs: {text}", file=sys.stderr)
