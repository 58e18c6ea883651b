"""Creates, stops, resumes and lists agent sessions.

  trunkline sessions create builder -- my-agent --quiet     in tmux where tmux is there, else in a process group
  trunkline sessions create builder --job 0a1b2c3d -- …     ends when this job has ended
  trunkline sessions create desk                            only its name; nothing is started
  trunkline sessions stop builder --graceful                stopped: kept for resume
  trunkline sessions stop builder --mode hard --reason "stuck" --capture-id stuck-1
  trunkline sessions resume builder
  trunkline sessions list --state running

Modes of stop: stop (stopped, kept for resume), hard (terminated, gone for ever), soft (archived: released
here, left alive). What a session runs, with its environment, is kept in a 0600 file until it is terminated.

Exit codes: 0; 2 wrong arguments; 3 no such session; 4 refused, with the reason; 5 the gateway does not answer.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from connectors.cli.shared.command_tail import CommandTailParser
from schemas.fold.life_cycles import SESSION_STATES

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_STOP_MODES = ("stop", "hard", "soft")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=CommandTailParser
    )
    create = commands.add_parser("create", help="create a session, and start a command in it")
    create.takes_command = True
    create.usage = "trunkline sessions create [-h] [options] NAME [-- COMMAND [ARGUMENT …]]"
    create.add_argument("name", metavar="NAME")
    create.add_argument("--job", metavar="ID", help="the session is for this job and ends with it")
    create.add_argument("--description", metavar="TEXT")
    stop = commands.add_parser("stop", help="stop, end or release a session")
    stop.add_argument("name", metavar="NAME")
    stop.add_argument("--mode", choices=_STOP_MODES, default="stop", help="(default: stop)")
    stop.add_argument("--reason", metavar="TEXT", help="kept in the ledger")
    stop.add_argument("--capture-id", metavar="ID", help="keep its screen under this name first")
    stop.add_argument("--graceful", action="store_true", help="SIGTERM and ten seconds before SIGKILL")
    resume = commands.add_parser("resume", help="run a stopped session again")
    resume.add_argument("name", metavar="NAME")
    listing = commands.add_parser("list", help="list sessions, the newest last")
    listing.add_argument("--state", choices=SESSION_STATES, metavar="S", help=", ".join(SESSION_STATES))
    for command in (create, stop, resume, listing):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    from connectors.cli.agents.sessions_actions import ACTIONS

    return ACTIONS[args.action](args, settings)
