"""`trunkline keys rotate job`: a new secret for a job, kept where the one before it is kept."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import TYPE_CHECKING, Any

from connectors.cli.jobs.jobs_actions import checked_job
from connectors.cli.shared.hub_options import named_request
from connectors.cli.shared.text_table import print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.job_tools.job_secrets import find_secret, replace_private, store_rotated
from connectors.terminal.terminal_text import escaped
from schemas.errors import UsageError

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


def rotate(args: argparse.Namespace, settings: Settings) -> int:
    """Give the job a new secret, keep it, and print it once, unless it goes to a file that is named."""
    job_id, path = checked_job(args.job), args.secret_file
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--secret-file: there is no folder {path.parent}")
    with (
        GatewayClient(settings) as gateway,
        named_request(args.request_id, "the job has its new secret") as request_id,
    ):
        body = {"overlap_s": round(args.overlap)}
        found = gateway.post(path_of("jobs", job_id, "secret"), body, request_id=request_id)
    told = _keep(args, settings, found)
    if args.json:
        rest = {name: value for name, value in found.items() if name != "secret"}
        print_json({**rest, **told, "request_id": request_id})
        return 0
    print(f"job     {job_id}")
    print(f"secret  {told.get('secret') or 'in ' + told['secret_file']}")
    print(f"user    {escaped(found['mqtt_user'])} at the backbone's own MQTT broker")
    print(f"older   good until {escaped(found['old_secret_ends_at'])}")
    if "secret" in told:
        print(f"The secret is not shown again; it is kept in {told['secret_file']}.")
    print("Give it to the agent in time: as TRUNKLINE_JOB_SECRET, or let its session pick the job again.")
    return 0


def _keep(args: argparse.Namespace, settings: Settings, found: dict[str, Any]) -> dict[str, str]:
    """Write the secret where it is wanted, and where the one before it is kept here; what may be shown."""
    secret, path = found["secret"], args.secret_file
    if path is not None:
        replace_private(path, secret + "\n", "the job's secret")
    if path is None or find_secret(settings, args.job) is not None:
        ends_at = datetime.fromisoformat(found["old_secret_ends_at"]).timestamp()
        kept = store_rotated(settings, args.job, secret, ends_at)
        return {"secret": secret, "secret_file": str(kept)} if path is None else {"secret_file": str(path)}
    return {"secret_file": str(path)}
