"""Creates, stops and resumes sessions in the registry and on this machine, in step (JE-14).

A new run is started without its command, registered, and only then released. A stop is registered before
anything is ended. So the registry knows every running command, and a refused stop ends nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.machine.process_tree import clean_environment
from connectors.programs.processes.session_host import GRACE_S, SessionHost
from schemas.streams.session.session_registry import HARD, SOFT, TERMINATED
from trunkline_agent.errors import NotFound, Refused, UsageError
from trunkline_agent.wire.ids import is_name

Row = dict[str, Any]


def find_session(gateway: GatewayClient, name: str) -> Row | None:
    """Ask the gateway for a session, and return its row in the registry, or None if there is no such session.

    Raises:
        UsageError: `name` is not a valid name. The gateway is not asked.
        TrunklineError: The gateway refuses or does not answer.
    """
    if not is_name(name):
        raise UsageError(f"not a name (letters, digits, '.', '_', '-'; first a letter or digit): {name!r}")
    try:
        found: Row = gateway.get(path_of("sessions", name))
    except NotFound:
        return None
    return found


def refuse_taken(gateway: GatewayClient, name: str) -> None:
    """Raise Refused if a session with this name exists, whether it runs or has ended: a name is used once."""
    row = find_session(gateway, name)
    if row is not None:
        raise Refused(f"there is a session {name} already, it is {row['status']}; choose another name")


def create_session(
    gateway: GatewayClient,
    host: SessionHost,
    name: str,
    command: list[str],
    *,
    for_job: str | None = None,
    description: str | None = None,
    environment: dict[str, str] | None = None,
    instructions: str | None = None,
) -> Row:
    """Start a new session's wrapper process on this machine, register the session, and return its row.

    The wrapper waits. The command itself begins when the caller calls `host.release` with the row's handle.
    After an error nothing runs.

    Args:
        gateway: The client of the gateway.
        host: The sessions on this machine.
        name: The session's name.
        command: The program and its arguments. Empty: only register the name, and start nothing.
        for_job: The id of the job for which the session is made. The session is ended after this job. None: it
            is made for any jobs.
        description: A text for people.
        environment: The command's environment. None: this process's, without Trunkline's settings and secrets.
        instructions: The text on the command's standard input. None: it is the terminal of tmux, or empty.

    Raises:
        Refused: A session with this name exists.
        TrunklineError: The gateway does not answer, or the wrapper cannot be started.
    """
    refuse_taken(gateway, name)
    body = {"session": name, "description": description, "for_job": for_job, "host": host.name}
    if not command:
        row: Row = gateway.post(path_of("sessions"), body | {"host": None})
        return row
    given = clean_environment() if environment is None else environment
    spec = host.prepare(name, command, folder=Path.cwd(), environment=given, instructions=instructions)
    handle: str | None = None
    try:
        handle = host.start(name, spec)
        row = gateway.post(path_of("sessions"), body | {"handle": handle})
        # Only now: another client may have taken the name meanwhile, and the kept command must be its own.
        host.keep(name, spec)
    except BaseException:
        spec.unlink(missing_ok=True)
        if handle is not None:
            host.stop(handle)
        raise
    return row


def stop_session(
    gateway: GatewayClient,
    host: SessionHost,
    name: str,
    *,
    mode: str,
    reason: str | None = None,
    capture_id: str | None = None,
    graceful: bool = False,
) -> tuple[Row, Path | None]:
    """Register a session's stop at the gateway, then end its processes if they run on this machine.

    Args:
        gateway: The client of the gateway.
        host: The sessions on this machine.
        name: The session's name.
        mode: SOFT archives the session and leaves its processes. HARD terminates it for good. Other modes allow
            a resume.
        reason: A text for the registry.
        capture_id: Before the stop, write the session's screen to a file with this name. None: do not.
        graceful: True: send SIGTERM, and SIGKILL after 10 seconds. False: SIGKILL at once.

    Returns:
        The session's row after the stop, and the file with the screen, or None without `capture_id`.

    Raises:
        Refused: The gateway refuses the stop, or the screen is not on this machine. Nothing was ended.
        NotFound: There is no such session.
        TrunklineError: The gateway does not answer. Or the stop is registered, and a process does not end.
    """
    before = find_session(gateway, name)
    here = before is not None and before["host"] == host.name and before["handle"] is not None
    captured = None
    if capture_id is not None:
        if before is None or not here:
            raise Refused(f"session {name} does not run on this machine, so its screen cannot be kept here")
        if not is_name(capture_id):
            raise UsageError(f"--capture-id: not a name: {capture_id!r}")
        captured = host.keep_capture(name, before["handle"], capture_id)
    body = {"mode": mode, "reason": reason, "capture_id": capture_id, "graceful": graceful}
    row: Row = gateway.post(path_of("sessions", name, "stop"), body)
    if here and mode != SOFT:
        host.stop(row["handle"], grace_s=GRACE_S if graceful else 0.0)
        if mode == HARD:
            host.forget(name)
    return row, captured


def resume_session(gateway: GatewayClient, host: SessionHost, name: str) -> Row:
    """Start a stopped session's command again, or reactivate an archived session. Return the session's row.

    A session that was registered without a command, or still runs here, is only changed in the registry.
    Otherwise the command starts before the call returns.

    Raises:
        Refused: The session cannot be resumed, or runs on another host. Nothing runs.
        NotFound: There is no such session, or this machine has no kept command for it.
        TrunklineError: The gateway does not answer, or the command cannot be started.
    """
    row = find_session(gateway, name)
    if row is None:
        raise NotFound(f"there is no session {name}")
    path = path_of("sessions", name, "resume")
    handle = row["handle"]
    if handle is None or row["status"] == TERMINATED:
        # For a terminated session the gateway answers with the reason.
        return dict(gateway.post(path))
    if row["host"] != host.name:
        raise Refused(f"session {name} runs on host {row['host']}; resume it there")
    if host.alive(handle):
        return dict(gateway.post(path))
    again = host.start(name)
    try:
        found = gateway.post(path, {"host": host.name, "handle": again})
    except BaseException:
        host.stop(again)
        raise
    host.release(name, again)
    return dict(found)
