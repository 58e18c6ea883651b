"""Lists and rotates keys: the master keys, which seal secrets, the keys with which agents sign, and the secrets
of jobs.

  trunkline keys list
  trunkline keys rotate master                          while the stack is down
  trunkline keys rotate agent builder builder.pem       the same as 'trunkline agents rotate'
  trunkline keys rotate job 0a1b2c3d --overlap 10m      a new secret for a job, which is printed once

A new master key seals from then on, the older ones stay for opening: nothing is sealed anew, and a refold of
the ledger comes out the same. Every program reads the keys at its start, and one that does not have the new key
cannot open what it seals. So the stack must be down; where programs run elsewhere, it goes in two steps:

  trunkline keys rotate master --add-only               then give the file to all, and start them all anew
  trunkline keys rotate master --activate k0a1b2c3d     and start them anew when it suits

Exit codes: 0; 2 wrong arguments; 3 no such key, agent or job; 4 refused, as while the stack runs, or for a job
that has ended; 5 the gateway does not answer (for an agent or a job).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from connectors.cli.shared.hub_options import add_request_id
from connectors.cli.shared.text_table import duration_s

if TYPE_CHECKING:
    from schemas.settings.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "list the master keys by id, the oldest first, and which of them seals"
    listing = commands.add_parser("list", help=text, description=text, allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    text = "put a new key in the place of an old one, which stays good for what it was used for"
    rotate = commands.add_parser("rotate", help=text, description=text, allow_abbrev=False)
    kinds = rotate.add_subparsers(dest="kind", required=True, metavar="KIND")
    text = "a new master key, which seals from now on"
    master = kinds.add_parser(
        "master",
        help=text,
        description=text,
        epilog="example: trunkline keys rotate master",
        allow_abbrev=False,
    )
    steps = master.add_mutually_exclusive_group()
    steps.add_argument(
        "--add-only", action="store_true", help="add it, for opening alone; the first of two steps"
    )
    steps.add_argument("--activate", metavar="ID", help="let this one seal: the second step")
    text = "a new key for an agent that takes part; the old one is good for a while yet"
    agent = kinds.add_parser(
        "agent",
        help=text,
        description=text,
        epilog="example: trunkline keys rotate agent builder builder.pem --overlap 2h",
        allow_abbrev=False,
    )
    agent.add_argument("name", metavar="NAME", help="the agent")
    agent.add_argument("file", type=Path, metavar="FILE", help="the agent's private key, replaced in one step")
    job = _add_job(kinds)
    for command in (agent, job):
        command.add_argument(
            "--overlap", type=duration_s, default=3600.0, metavar="TIME", help="as 90s, 5m, 2h (default: 1h)"
        )
    for command in (master, agent, job):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_job(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    text = "a new secret for a job that has not ended; the old one is good for a while yet"
    job = kinds.add_parser(
        "job",
        help=text,
        description=text,
        epilog="example: trunkline keys rotate job 0a1b2c3d --overlap 10m",
        allow_abbrev=False,
    )
    job.add_argument("job", metavar="ID", help="the job: 8 lower-case hex digits")
    job.add_argument(
        "--secret-file", type=Path, metavar="PATH", help="put the secret here, in one step, and do not print it"
    )
    add_request_id(job, "the same rotation")
    return job


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    if args.action == "list":
        return _list(args, settings)
    if args.kind == "agent":
        from connectors.cli.agents.agents_participants import rotate as rotate_agent

        return rotate_agent(args, settings)
    if args.kind == "job":
        from connectors.cli.keys.keys_job import rotate as rotate_job

        return rotate_job(args, settings)
    return _rotate_master(args, settings)


def _list(args: argparse.Namespace, settings: Settings) -> int:
    from connectors.tls_keys.master_keys import master_keys

    found = master_keys(settings)
    if args.json:
        print(json.dumps({"master": [{"key_id": key.key_id, "active": key.is_active} for key in found]}))
        return 0
    for key in found:
        print(f"master  {key.key_id}  {'seals and opens' if key.is_active else 'opens'}")
    print("Keys of an agent: trunkline agents status NAME")
    return 0


def _rotate_master(args: argparse.Namespace, settings: Settings) -> int:
    from connectors.local_stack import control
    from connectors.tls_keys.master_keys import activate, add_key, rotate
    from schemas.errors import Refused

    if args.add_only:
        key_id, said = add_key(settings), "opens; start every program anew with this file, then --activate it"
    elif args.activate is not None:
        activate(settings, args.activate)
        key_id, said = args.activate, "seals, in each program from its next start on"
    else:
        if control.running_state(settings) is not None:
            raise Refused(
                "the stack runs, and would go on with the keys that it has: first 'trunkline down', then this, "
                "then 'trunkline up'. Without a pause: --add-only, restart, --activate"
            )
        key_id, said = rotate(settings), "seals from now on; the older ones stay for opening. Back the file up"
    if args.json:
        print(json.dumps({"key_id": key_id, "active": not args.add_only, "file": str(settings.key_file)}))
    else:
        print(f"master key {key_id} {said}: {settings.key_file}")
    return 0
