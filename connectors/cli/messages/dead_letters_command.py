"""Lists and shows what was rejected, and puts it into the log again.

  trunkline dead-letters list --reason bad_signature --since 1d
  trunkline dead-letters show 2/1042                all columns of one; what is masked stays masked
  trunkline dead-letters replay 2/1042 2/1050       append again, as it came; it is settled anew

list and show read the ledger and need neither gateway nor brokers; replay needs Kafka, and says the new
verdict when the gateway answers. What is rejected again is a new row, and the command ends with 4.

Exit codes: 0; 2 wrong arguments; 3 nothing found; 4 cannot be replayed, or was rejected again; 5 Kafka does
not answer.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from connectors.cli.shared.text_table import duration_s
from schemas.wire.verdicts import REASONS

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_LIST_LIMIT = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = commands.add_parser("list", help="the newest, oldest of them first")
    listing.add_argument("--reason", choices=REASONS, metavar="R", help="only this reason")
    listing.add_argument("--door", metavar="D", help="only what came by this door, e.g. mqtt")
    listing.add_argument("--stream", metavar="KIND/ID", help="only this stream, e.g. job/0a1b2c3d")
    listing.add_argument("--since", type=duration_s, metavar="TIME", help="only of the last 2h, 1d, …")
    listing.add_argument(
        "--limit", type=int, default=_LIST_LIMIT, metavar="N", help=f"at most (default: {_LIST_LIMIT})"
    )
    show = commands.add_parser("show", help="all columns of one")
    show.add_argument("position", metavar="PARTITION/OFFSET")
    replay = commands.add_parser("replay", help="append one or several again")
    replay.add_argument("positions", metavar="PARTITION/OFFSET", nargs="+")
    for command in (listing, show, replay):
        command.add_argument("--json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    from connectors.cli.messages.dead_letters_actions import ACTIONS

    return ACTIONS[args.action](args, settings)
