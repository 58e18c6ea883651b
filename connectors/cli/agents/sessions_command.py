"""Creates, stops, resumes and lists agent sessions.

  trunkline sessions create builder -- my-agent --quiet     in tmux if it is installed, else a process group
  trunkline sessions create builder --job 0a1b2c3d -- …     ends when this job has ended
  trunkline sessions create desk                            only its name; nothing is started
  trunkline sessions stop builder --graceful                stopped: kept for resume
  trunkline sessions stop builder --mode hard --reason "stuck" --capture-id stuck-1
  trunkline sessions resume builder
  trunkline sessions list --state running

Modes of stop: stop (stopped, kept for resume), hard (terminated for ever), soft (archived: released here, its
process goes on). The session's command and environment are kept in a 0600 file until it is terminated.

Exit codes: 0; 2 wrong arguments; 3 no such session; 4 refused, with the reason; 5 the gateway does not answer.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from connectors.cli.shared.actions import Actions, argument, flag
from connectors.cli.shared.arguments import REASON, job_id
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.declared import Shown, add_declared
from connectors.cli.shared.text_output import age_of
from trunkline_agent.terminal_text import escaped

_STOP_MODES: Final = ("stop", "hard", "soft")
_COLUMNS: Final[Columns] = {
    "SESSION": "session",
    "STATE": "status",
    "AGE": lambda row: age_of(row["created_at"]),
    "JOB": lambda row: row["job_id"] or row["for_job"],
    "HOST": "host",
    "HANDLE": "handle",
    "REASON": "reason",
}
_NAME: Final = argument("name", "the session")
ACTIONS: Final = Actions()


@ACTIONS.add(
    _NAME,
    argument("--job", "the session is for this job and ends with it", type=job_id, metavar="ID"),
    argument("--description", "what the session is for", metavar="TEXT"),
    takes_command=True,
    usage="trunkline sessions create [-h] [options] NAME [-- COMMAND [ARGUMENT …]]",
)
def _create(call: Call) -> int:
    """Create a session, and start a command in it.

    The command starts once the registry has the session.
    """
    from connectors.programs.processes.session_host import SessionHost
    from connectors.programs.processes.session_registry_client import create_session

    host = SessionHost(call.settings)
    with call.gateway() as gateway:
        row = create_session(
            gateway, host, call.name, call.command, for_job=call.job, description=call.description
        )
    if row["handle"] is not None:
        host.release(call.name, row["handle"])
    return _print(call, row, "is created" if row["handle"] is None else f"runs as {row['handle']}")


@ACTIONS.add(
    _NAME,
    argument("--mode", "(default: stop)", choices=_STOP_MODES, default="stop"),
    REASON,
    argument("--capture-id", "keep its screen under this name first", metavar="ID"),
    flag("--graceful", "SIGTERM and ten seconds before SIGKILL"),
)
def _stop(call: Call) -> int:
    """Stop, end or release a session."""
    from connectors.programs.processes.session_host import SessionHost
    from connectors.programs.processes.session_registry_client import stop_session

    host = SessionHost(call.settings)
    with call.gateway() as gateway:
        how = {"mode": call.mode, "reason": call.reason, "capture_id": call.capture_id}
        row, captured = stop_session(gateway, host, call.name, graceful=call.graceful, **how)
    if captured is not None:
        print(f"its screen is in {captured}", file=sys.stderr)
    if row["handle"] is not None and row["host"] != host.name:
        print(f"the gateway on host {escaped(str(row['host']))} ends it there", file=sys.stderr)
    return _print(call, row, f"is {row['status']}")


@ACTIONS.add(_NAME)
def _resume(call: Call) -> int:
    """Run a stopped session again."""
    from connectors.programs.processes.session_host import SessionHost
    from connectors.programs.processes.session_registry_client import resume_session

    with call.gateway() as gateway:
        row = resume_session(gateway, SessionHost(call.settings), call.name)
    return _print(call, row, f"is {row['status']}")


def _oldest_first(found: Row) -> Row:
    sessions = sorted(found["sessions"], key=lambda row: (row["created_at"], row["session"]))
    return {"sessions": sessions, "total": found.get("total", len(sessions))}


add_declared(
    ACTIONS,
    "sessions",
    Shown("list", "List sessions, the newest last", adapted=_oldest_first, columns=_COLUMNS),
)


def _print(call: Call, row: dict[str, Any], text: str) -> int:
    return call.print_answer(row, f"session {call.name} {escaped(text)}")
