"""Shows which listeners the XML pump has, and changes them by signed commands.

  trunkline organism show                             the listeners there are, and the version of the whole
  trunkline organism add-listener adder --handler my_handlers.calculator:add
  trunkline organism remove-listener adder            answered when it gets nothing any more
  trunkline organism reload                           conf/organism.yaml and the handlers' modules, anew
  trunkline organism list-listeners                   as show, over the socket and without a token
  trunkline organism get-status                       how many listeners there are and messages wait
  trunkline organism keys                             whose commands count here

Commands do not go by the hub's port: they go to a Unix socket on the gateway's machine, signed with the
operator's key (keys/commands/operator.pem below the data directory) or with the one of --key. A command counts
once. 'show' asks the hub and needs a token.

Exit codes: 0; 2 wrong arguments; 3 no such listener; 4 refused; 5 no gateway answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from connectors.cli.shared.hub_options import add_action

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_Commands = argparse._SubParsersAction


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "list the listeners by name, and what each of them takes"
    show = add_action(commands, "show", text, "trunkline organism show --json | jq -r '.listeners[].listener'")
    show.add_argument("--removed", action="store_true", help="those that were removed")
    _configure_add(commands)
    text = "remove a listener: what waits for it goes back to its senders; what it has begun, it ends"
    remove = add_action(commands, "remove-listener", text, "trunkline organism remove-listener adder")
    remove.add_argument("name", metavar="NAME", help="the listener")
    text = "read conf/organism.yaml again: these listeners and no others; handlers are loaded anew"
    reload_ = add_action(commands, "reload", text, "trunkline organism reload")
    text = "list the listeners over the command socket, without a token"
    listed = add_action(commands, "list-listeners", text, "trunkline organism list-listeners --json")
    text = "show how many listeners there are, and how many messages wait and are handled"
    status = add_action(commands, "get-status", text, "trunkline organism get-status")
    for command in (remove, reload_, listed, status):
        _with_key(command)
    text = "list the keys whose commands count, and the files in their folder that hold none"
    add_action(commands, "keys", text, "trunkline organism keys")


def _configure_add(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "add a listener; root tag and namespace are those of the class that its handler takes"
    add = add_action(
        commands,
        "add-listener",
        text,
        "trunkline organism add-listener adder --handler my_handlers.calculator:add --concurrency 4",
    )
    add.add_argument("name", metavar="NAME", help="its name; no principal, agent or listener may have it")
    add.add_argument("--handler", metavar="MODULE:NAME", help="the function, where the pumps can import it")
    add.add_argument(
        "--type", choices=("handler", "human", "llm"), help="a function (default), a person, a language model"
    )
    add.add_argument("--capability", metavar="TEXT", help="what it can do, for those who see it")
    add.add_argument("--root-tag", metavar="TAG", help="the payload's element; of an llm and a human")
    add.add_argument("--namespace", metavar="URI", help="the payload's namespace; of an llm and a human")
    add.add_argument(
        "--tool",
        dest="tools",
        action="append",
        metavar="NAME",
        help="a listener that it sees; may be repeated (default: all)",
    )
    add.add_argument("--no-tools", action="store_true", help="it sees nobody")
    add.add_argument("--concurrency", type=int, metavar="N", help="how many messages at once (default: 8)")
    add.add_argument("--per-minute", type=int, metavar="N", help="how many messages a minute")
    add.add_argument("--tokens-per-minute", type=int, metavar="N", help="of an llm")
    add.add_argument("--timeout", type=float, metavar="SECONDS", help="for one message (default: 30)")
    add.add_argument("--model", metavar="NAME", help="of an llm")
    add.add_argument("--client", metavar="MODULE:NAME", help="what speaks to the model")
    add.add_argument("--system-prompt", metavar="TEXT", help="of an llm")
    _with_key(add)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    from connectors.cli.organism.organism_actions import ACTIONS

    return ACTIONS[args.action](args, settings)


def _with_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="sign with this private key (default: the operator's)"
    )
