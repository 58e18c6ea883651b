"""Registers, picks, cancels, shows and exports jobs, and submits work to an agent.

  trunkline jobs register --description "build the docs"
      prints the job's id and its secret, once: whoever publishes the job's events signs with it. The secret
      is also kept on this machine for 'watch' and 'publish', in a 0600 file.
  trunkline jobs register --description "build the docs" --broker mq.example:1884
      the job's events go to an MQTT broker of its own; --broker-file for one with user, password, TLS
  trunkline jobs pick --session builder          the oldest job that waits for such a session
  trunkline jobs list --state running            newest last
  trunkline jobs cancel 0a1b2c3d --reason "no longer needed"
  trunkline jobs export 0a1b2c3d --to audit      meta.json, status.json, events.ndjson, from the ledger
  trunkline jobs submit "build the docs" --session builder --instructions task.md -- my-agent --quiet
      registers, starts the agent in a session of its own, watches, ends when the job has ended

Exit codes: 0; 2 wrong arguments; 3 no such job, nothing to pick; 4 refused, with the reason; 5 the gateway
does not answer; 130 after Ctrl-C. 'submit' ends as 'watch' does: 0 completed, 1 error or cancelled, 2 the
time ran out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from connectors.cli.shared.broker_options import add_broker_options
from connectors.cli.shared.command_tail import CommandTailParser
from connectors.cli.shared.text_table import duration_s
from schemas.fold.life_cycles import JOB_STATES

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_JOB_HELP = "the job: 8 lower-case hex digits"
_LIST_LIMIT = 50


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=CommandTailParser
    )
    register = _add(commands, "register", "register a job, print its id and secret once")
    register.add_argument("--description", required=True, metavar="TEXT", help="what the job is to do")
    register.add_argument("--session", metavar="NAME", help="only this agent session may pick it")
    register.add_argument(
        "--notify",
        action="append",
        choices=("permission", "end", "nothing"),
        help="what you are told of in your mailbox; may be repeated (default: the end)",
    )
    add_broker_options(register)
    _add_secret_file(register)
    pick = _add(commands, "pick", "take the oldest pending job that a session may have")
    pick.add_argument("--session", required=True, metavar="NAME", help="the session that takes it")
    _add_secret_file(pick)
    cancel = _add(commands, "cancel", "cancel a job that has not ended")
    cancel.add_argument("job", metavar="ID", help=_JOB_HELP)
    cancel.add_argument("--reason", metavar="TEXT", help="kept in the ledger")
    cancel.add_argument(
        "--request-id", metavar="NAME", help="the same name again is the same cancellation, not a second one"
    )
    show = _add(commands, "show", "show one job")
    show.add_argument("job", metavar="ID", help=_JOB_HELP)
    _configure_list(_add(commands, "list", "list jobs, the newest last"))
    export = _add(commands, "export", "write one job's history into a new folder, from the ledger")
    export.add_argument("job", metavar="ID", help=_JOB_HELP)
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a folder that does not exist")
    _configure_submit(_add(commands, "submit", "register a job and have an agent do it in a session"))


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    if args.action == "submit":
        from connectors.cli.jobs.jobs_submit import submit

        return submit(args, settings)
    from connectors.cli.jobs.jobs_actions import ACTIONS

    return ACTIONS[args.action](args, settings)


def _add(commands: argparse._SubParsersAction[CommandTailParser], name: str, text: str) -> CommandTailParser:
    found = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    found.add_argument("--json", action="store_true", help="print one JSON object")
    return found


def _add_secret_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="PATH",
        help="write the secret there (new file, 0600), and the job's own broker, if it has one, into "
        "PATH.broker; do not print the secret nor keep it elsewhere",
    )


def _configure_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", choices=JOB_STATES, metavar="S", help=f"one of {', '.join(JOB_STATES)}")
    parser.add_argument("--session", metavar="NAME", help="only the jobs that this session has")
    parser.add_argument("--older-than", type=duration_s, metavar="TIME", help="registered before, e.g. 2h")
    parser.add_argument("--newer-than", type=duration_s, metavar="TIME", help="registered since, e.g. 30m")
    parser.add_argument(
        "--limit", type=int, default=_LIST_LIMIT, metavar="N", help=f"at most (default: {_LIST_LIMIT})"
    )


def _configure_submit(parser: CommandTailParser) -> None:
    parser.takes_command = True
    parser.usage = (
        "trunkline jobs submit [-h] [--json] --session NAME [options] DESCRIPTION -- COMMAND [ARGUMENT …]"
    )
    parser.add_argument("description", metavar="DESCRIPTION", help="what the job is to do")
    parser.add_argument("--session", required=True, metavar="NAME", help="the new session that it runs in")
    add_broker_options(parser)
    parser.add_argument(
        "--instructions",
        metavar="FILE",
        help="the agent reads this on standard input, after lines that say how to publish (- takes ours)",
    )
    parser.add_argument(
        "--bare-instructions", action="store_true", help="leave out the lines that say how to publish"
    )
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help="where the audit files go (default: below data_dir)"
    )
    parser.add_argument("--timeout", type=duration_s, metavar="TIME", help="stop waiting after this long")
    parser.add_argument(
        "--idle-timeout", type=duration_s, metavar="TIME", help="stop waiting when no event came for this long"
    )
