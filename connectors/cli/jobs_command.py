"""Registers and cancels jobs.

trunkline jobs register --description "build the docs"
    prints the job's id and its secret, once: whoever publishes the job's events signs with it.
trunkline jobs register --description "build the docs" --secret-file build.secret
    writes the secret to a new 0600 file instead of the screen.
trunkline jobs cancel 0a1b2c3d --reason "no longer needed"
    puts the cancellation into the log; it counts if the job has not ended before it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from connectors.job_registry import cancel_job, register_job
from connectors.publisher import Publisher
from schemas.errors import UsageError
from schemas.event_topic import check_topic
from schemas.sealing import load_keyring
from schemas.settings import Settings
from schemas.signing import new_secret


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    register = commands.add_parser("register", help="register a job, print its id and secret once")
    register.add_argument("--description", required=True, metavar="TEXT", help="what the job is to do")
    register.add_argument("--session", metavar="NAME", help="only this agent session may pick it")
    register.add_argument(
        "--secret-file",
        type=Path,
        metavar="PATH",
        help="write the secret there (new file, 0600), do not print it",
    )
    register.add_argument("--json", action="store_true", help="print one JSON object")
    cancel = commands.add_parser("cancel", help="cancel a job that has not ended")
    cancel.add_argument("job", metavar="ID", help="the job: 8 lower-case hex digits")
    cancel.add_argument("--reason", default="", metavar="TEXT", help="kept in the ledger")
    cancel.add_argument(
        "--request-id", metavar="NAME", help="the same name again is the same cancellation, not a second one"
    )
    cancel.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    return _register(args, settings) if args.action == "register" else _cancel(args, settings)


def _register(args: argparse.Namespace, settings: Settings) -> int:
    keyring = load_keyring(settings)
    check_topic(settings)
    secret = new_secret()
    if args.secret_file is not None:
        _write_secret(args.secret_file, secret)
    try:
        with Publisher(settings) as publisher:
            job = register_job(publisher, keyring, args.description, session=args.session, secret=secret)
    except BaseException:
        if args.secret_file is not None:
            args.secret_file.unlink(missing_ok=True)
        raise
    shown = {"secret_file": str(args.secret_file)} if args.secret_file else {"secret": job.secret}
    if args.json:
        print(json.dumps({"job_id": job.job_id, **shown, "position": list(job.position)}))
        return 0
    print(f"job     {job.job_id}")
    if args.secret_file is not None:
        print(f"secret  in {args.secret_file}")
    else:
        print(f"secret  {job.secret}")
        print("The secret is not shown again. Give it to the agent as TRUNKLINE_JOB_SECRET.")
    return 0


def _cancel(args: argparse.Namespace, settings: Settings) -> int:
    check_topic(settings)
    with Publisher(settings) as publisher:
        position = cancel_job(publisher, args.job, reason=args.reason, request_id=args.request_id)
    if args.json:
        print(json.dumps({"job_id": args.job, "position": list(position)}))
    else:
        print(
            f"{args.job}: cancellation in the log at partition {position.partition}, offset {position.offset}"
        )
    return 0


def _write_secret(path: Path, secret: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise UsageError(f"--secret-file: {path} is there already; it is not overwritten") from None
    except OSError as error:
        raise UsageError(f"--secret-file: cannot write {path}: {error.strerror}") from None
