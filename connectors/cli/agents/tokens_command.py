"""Lists and revokes the tokens of tasks.

  trunkline tokens list --status active
  trunkline tokens revoke 3f9c0a1b2d4e --reason "it was in a log"

A token belongs to one task and ends with it. Its value is told by 'tasks submit' alone; here it is named by
the first 12 digits of its hash. To revoke it while the task goes on locks the task's agent out, for ever.

Exit codes: 0; 2 wrong arguments; 3 no such token; 4 refused; 5 the gateway does not answer.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.hub_options import add_limit

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_STATES: Final = ("active", "revoked", "expired")
_TOKEN_ID: Final = re.compile(r"[0-9a-f]{12}").fullmatch


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "list the tokens of tasks, the newest last; never their values"
    listing = commands.add_parser(
        "list",
        help=text,
        description=text,
        epilog="example: trunkline tokens list --status active",
        allow_abbrev=False,
    )
    listing.add_argument("--status", choices=_STATES, metavar="S", help=f"one of {', '.join(_STATES)}")
    add_limit(listing)
    text = "revoke a token while its task goes on; a second time changes nothing"
    revoke = commands.add_parser(
        "revoke",
        help=text,
        description=text,
        epilog='example: trunkline tokens revoke 3f9c0a1b2d4e --reason "it was in a log"',
        allow_abbrev=False,
    )
    revoke.add_argument("token_id", metavar="TOKEN_ID", help="12 lower-case hex digits, from 'tokens list'")
    revoke.add_argument("--reason", metavar="TEXT", help="kept in the ledger")
    for command in (listing, revoke):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    return _revoke(args, settings) if args.action == "revoke" else _list(args, settings)


def _list(args: argparse.Namespace, settings: Settings) -> int:
    from connectors.cli.shared.hub_rows import print_rows
    from connectors.gateway_client.gateway_client import GatewayClient, path_of

    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("tokens"), {"status": args.status, "limit": args.limit})
    found["tokens"].reverse()
    heading = ("TOKEN", "STATE", "AGE", "LEFT", "AGENT", "TASK", "CAPABILITIES", "WHY REVOKED")
    return print_rows(args, found, "tokens", heading, _cells)


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    from connectors.cli.shared.text_table import age_of

    now = datetime.now(UTC)
    age = age_of(_moment(row["issued"]).isoformat(), now)
    # What is the age of now when it ends is what it still has.
    left = age_of(now.isoformat(), _moment(row["expiry"])) if row["status"] == "active" else None
    capabilities = ", ".join(row["capabilities"]) or None
    return (
        row["token_id"], row["status"], age, left, row["agent_name"], row["task_id"], capabilities,
        row["revoked_why"],
    )  # fmt: skip


def _moment(since_1970_ms: int) -> datetime:
    return datetime.fromtimestamp(since_1970_ms / 1000, UTC)


def _revoke(args: argparse.Namespace, settings: Settings) -> int:
    from connectors.cli.shared.text_table import print_json
    from connectors.gateway_client.gateway_client import GatewayClient, path_of
    from connectors.terminal.terminal_text import escaped
    from schemas.errors import UsageError

    if _TOKEN_ID(args.token_id) is None:
        # It is not repeated: somebody may have given the token itself.
        raise UsageError("a token is named by the 12 lower-case hex digits that 'tokens list' shows")
    with GatewayClient(settings) as gateway:
        row = gateway.post(path_of("tokens", args.token_id, "revoke"), {"reason": args.reason})
    if args.json:
        print_json(row)
    else:
        print(f"token {args.token_id} of task {escaped(row['task_id'])} is {escaped(row['status'])}")
    return 0
