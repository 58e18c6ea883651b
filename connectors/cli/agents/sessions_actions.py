"""What `trunkline sessions` does for each action."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, Final

from connectors.cli.jobs.jobs_actions import checked_job
from connectors.cli.shared.text_table import age_of, aligned, print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.processes.session_host import SessionHost
from connectors.processes.session_registry_client import create_session, resume_session, stop_session
from connectors.terminal.terminal_text import escaped
from schemas.errors import NotFound
from schemas.settings.settings import Settings


def create(args: argparse.Namespace, settings: Settings) -> int:
    """Create a session; its command begins when the registry knows it."""
    host = SessionHost(settings)
    for_job = None if args.job is None else checked_job(args.job)
    with GatewayClient(settings) as gateway:
        row = create_session(
            gateway, host, args.name, args.command, for_job=for_job, description=args.description
        )
    if row["handle"] is not None:
        host.release(args.name, row["handle"])
    return _told(args, row, "is created" if row["handle"] is None else f"runs as {row['handle']}")


def stop(args: argparse.Namespace, settings: Settings) -> int:
    """Stop, end or release a session."""
    host = SessionHost(settings)
    with GatewayClient(settings) as gateway:
        row, captured = stop_session(
            gateway,
            host,
            args.name,
            mode=args.mode,
            reason=args.reason,
            capture_id=args.capture_id,
            graceful=args.graceful,
        )
    if captured is not None:
        print(f"its screen is in {captured}", file=sys.stderr)
    if row["handle"] is not None and row["host"] != host.name:
        print(f"it is ended on host {escaped(str(row['host']))} by the gateway there", file=sys.stderr)
    return _told(args, row, f"is {row['status']}")


def resume(args: argparse.Namespace, settings: Settings) -> int:
    """Run a session again."""
    with GatewayClient(settings) as gateway:
        row = resume_session(gateway, SessionHost(settings), args.name)
    return _told(args, row, f"is {row['status']}")


def list_sessions(args: argparse.Namespace, settings: Settings) -> int:
    """Print the rows that are wanted; NotFound when there is none."""
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("sessions"), {"state": args.state})
    sessions = sorted(found["sessions"], key=lambda row: (row["created_at"], row["session"]))
    if args.json:
        print_json({"sessions": sessions, "total": found.get("total", len(sessions))})
        return 0
    if not sessions:
        raise NotFound("there is no such session")
    rows = [
        (s["session"], s["status"], age_of(s["created_at"]), s["job_id"] or s["for_job"], s["host"],
         s["handle"], s["reason"])
        for s in sessions
    ]  # fmt: skip
    print(aligned(("SESSION", "STATE", "AGE", "JOB", "HOST", "HANDLE", "REASON"), rows))
    return 0


def _told(args: argparse.Namespace, row: dict[str, Any], text: str) -> int:
    if args.json:
        print_json(row)
    else:
        print(f"session {args.name} {escaped(text)}")
    return 0


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "create": create,
    "stop": stop,
    "resume": resume,
    "list": list_sessions,
}
