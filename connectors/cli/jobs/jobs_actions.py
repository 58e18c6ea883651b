"""What `trunkline jobs` does for each action but `submit`: asks the gateway, or the ledger, and prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from connectors.cli.shared.broker_options import read_broker
from connectors.cli.shared.private_file import new_private_file
from connectors.cli.shared.text_table import age_of, aligned, fields, print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.job_tools.job_brokers import broker_file, shown_fields, store_broker
from connectors.job_tools.job_secrets import secret_path, store_secret
from connectors.terminal.terminal_text import escaped
from schemas.errors import NotFound, UsageError
from schemas.wire.ids import is_job_id

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


def checked_job(job_id: str) -> str:
    """`job_id` itself. Raises UsageError for what is none."""
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    return job_id


def register(args: argparse.Namespace, settings: Settings) -> int:
    """Register a job; keep its secret and its broker; print id and secret once."""
    broker = read_broker(args)
    notify = None if args.notify is None else sorted({*args.notify} - {"nothing"})
    body = {"description": args.description, "session": args.session, "broker": broker, "notify": notify}
    with new_private_file(args.secret_file, "--secret-file") as file, GatewayClient(settings) as gateway:
        job = gateway.post(path_of("jobs"), body)
        told = _keep_grant(job, broker, args.secret_file, file, settings)
    if args.json:
        print_json({"job_id": job["job_id"], **told, "position": job["position"]})
    else:
        print(f"job     {job['job_id']}")
        _print_broker(broker, told)
        _print_secret(told)
    return 0


def pick(args: argparse.Namespace, settings: Settings) -> int:
    """Take a job for a session; print what it needs to do it."""
    with new_private_file(args.secret_file, "--secret-file") as file, GatewayClient(settings) as gateway:
        job = gateway.post(path_of("jobs", "pick"), {"session": args.session})
        broker = job["broker"]
        told = _keep_grant(job, broker, args.secret_file, file, settings)
    if args.json:
        rest = {name: value for name, value in job.items() if name != "secret"}
        print_json({**rest, "broker": None if broker is None else shown_fields(broker), **told})
        return 0
    print(f"job     {job['job_id']}")
    print(f"to do   {escaped(job['description'])}")
    _print_broker(broker, told)
    _print_secret(told)
    return 0


def cancel(args: argparse.Namespace, settings: Settings) -> int:
    """Cancel a job and say what it is now."""
    with GatewayClient(settings) as gateway:
        path = path_of("jobs", checked_job(args.job), "cancel")
        found = gateway.post(path, {"reason": args.reason}, request_id=args.request_id)
    if args.json:
        print_json(found)
    else:
        again = " (it was before)" if found["verdict"] == "duplicate" else ""
        print(f"{args.job} is {escaped(found['status'])}{again}")
    return 0


def show(args: argparse.Namespace, settings: Settings) -> int:
    """Print one job's row."""
    with GatewayClient(settings) as gateway:
        row = gateway.get(path_of("jobs", checked_job(args.job)))
    if args.json:
        print_json(row)
    else:
        broker = row.pop("broker", None)
        print(fields({**row, "broker": None if broker is None else _broker_text(broker)}))
    return 0


def list_jobs(args: argparse.Namespace, settings: Settings) -> int:
    """Print the rows that are wanted; NotFound when there is none."""
    wanted = {
        "state": args.state,
        "session": args.session,
        "older_than_s": args.older_than,
        "newer_than_s": args.newer_than,
        "limit": args.limit,
    }
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("jobs"), wanted)
    jobs = sorted(found["jobs"], key=lambda row: (row["registered_at"], row["job_id"]))
    if args.json:
        print_json({"jobs": jobs, "total": found["total"]})
        return 0
    if not jobs:
        raise NotFound("there is no such job")
    rows = [
        (j["job_id"], j["status"], age_of(j["registered_at"]), j["session"] or j["session_wanted"], j["events"],
         j["description"] or j["last_detail"])
        for j in jobs
    ]  # fmt: skip
    print(aligned(("JOB", "STATE", "AGE", "SESSION", "EVENTS", "DESCRIPTION"), rows))
    if found["total"] > len(jobs):
        print(f"{len(jobs)} of {found['total']}; --limit shows more", file=sys.stderr)
    return 0


def export(args: argparse.Namespace, settings: Settings) -> int:
    """Write the job's history into a new folder; needs the ledger, not the gateway."""
    from connectors.ledger_files.ledger_export import export_job

    done = export_job(settings, checked_job(args.job), args.to)
    if args.json:
        print_json({"job_id": args.job, "to": str(done.folder), "status": done.status, "events": done.events})
    else:
        print(f"{args.job}: {done.events} records, {escaped(str(done.status))}, in {done.folder}")
    return 0


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "register": register,
    "pick": pick,
    "cancel": cancel,
    "show": show,
    "list": list_jobs,
    "export": export,
}


def _keep_grant(
    job: dict[str, Any],
    broker: Mapping[str, Any] | None,
    path: Path | None,
    file: IO[str] | None,
    settings: Settings,
) -> dict[str, str]:
    """Write secret and broker where they are wanted; what of it may be shown."""
    job_id = job["job_id"]
    beside = secret_path(settings, job_id) if path is None else path
    told = {"broker_file": str(broker_file(beside))} if broker else {}
    if broker or path is None:
        # The broker first: whoever finds the secret finds the job's broker, too.
        store_broker(beside, job_id, broker)
    if path is None or file is None:
        kept = store_secret(settings, job_id, job["secret"])
        return {"secret": job["secret"], "secret_file": str(kept), **told}
    file.write(job["secret"] + "\n")
    return {"secret_file": str(path), **told}


def _print_broker(broker: Mapping[str, Any] | None, told: dict[str, str]) -> None:
    if broker:
        print(f"broker  {_broker_text(broker)}")
        print(f"        It is kept, with its password if it has one, in {told['broker_file']}.")


def _broker_text(broker: Mapping[str, Any]) -> str:
    """What an overlay names, on one line, without its password, sealed or not."""
    shown = {name: value for name, value in shown_fields(broker).items() if name != "sealed_password"}
    return ", ".join(f"{name} {escaped(str(value))}" for name, value in shown.items())


def _print_secret(told: dict[str, str]) -> None:
    if "secret" in told:
        print(f"secret  {told['secret']}")
        print(f"The secret is not shown again; it is kept in {told['secret_file']}.")
        print("Give it to the agent as TRUNKLINE_JOB_SECRET.")
    else:
        print(f"secret  in {told['secret_file']}")
