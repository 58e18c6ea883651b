"""Gives tasks to the hub's agents, follows them and ends them.

  trunkline tasks submit echo "answer Ann's questions"
      starts the agent 'echo' and prints the task's id. The agent gets the task's token by itself;
      --show-token prints it, too, for who wants to speak in the agent's place.
  trunkline tasks submit echo "sum up the mail" --wait 10m       waits for the end, prints the result
  trunkline tasks list --status running
  trunkline tasks complete 5b7e… --result -                      the result comes from standard input
  trunkline tasks cancel 5b7e… --reason "no longer needed"       stops what was launched for it
  trunkline tasks containers                                     what was launched, and how far it is

Exit codes: 0; 1 '--wait' ran out of time, and the task runs on; 2 wrong arguments; 3 no such task or agent;
4 refused, not started, or with '--wait' failed or cancelled; 5 the gateway does not answer; 130 after Ctrl-C,
which cancels nothing.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from connectors.cli.shared.hub_options import add_action, add_limit, add_request_id
from connectors.cli.shared.text_table import duration_s
from schemas.fold.life_cycles import TASK_STATES

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_Commands = argparse._SubParsersAction


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's sub-commands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _configure_submit(commands)
    listing = add_action(
        commands, "list", "list tasks, the newest last", "trunkline tasks list --agent echo --status failed"
    )
    listing.add_argument("--status", choices=TASK_STATES, metavar="S", help=f"one of {', '.join(TASK_STATES)}")
    listing.add_argument("--agent", metavar="NAME", help="only the tasks of this agent")
    add_limit(listing)
    _with_task(add_action(commands, "show", "show one task", "trunkline tasks show 5b7e…"))
    complete = _with_task(
        add_action(
            commands, "complete", "say that a task is done", "date | trunkline tasks complete 5b7e… --result -"
        )
    )
    complete.add_argument("--result", metavar="TEXT", help="what came of it; - reads it from standard input")
    fail = _with_task(
        add_action(
            commands, "fail", "say that a task has failed", 'trunkline tasks fail 5b7e… "the mail is away"'
        )
    )
    fail.add_argument("error", metavar="ERROR", help="why, for whoever has submitted it")
    cancel = _with_task(
        add_action(commands, "cancel", "cancel a task that has not ended", "trunkline tasks cancel 5b7e…")
    )
    cancel.add_argument("--reason", metavar="TEXT", help="kept with the task")
    add_limit(
        add_action(
            commands,
            "containers",
            "list what was launched for tasks, the newest last",
            "trunkline tasks containers --limit 5",
        )
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do the action and return the exit code. Raises TrunklineError."""
    from connectors.cli.jobs.tasks_actions import ACTIONS

    return ACTIONS[args.action](args, settings)


def _with_task(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("task", metavar="ID", help="the task, as 'submit' and 'list' show it")
    return parser


def _configure_submit(commands: _Commands[argparse.ArgumentParser]) -> None:
    example = 'trunkline tasks submit echo "sum up the mail" --wait 10m --json'
    submit = add_action(commands, "submit", "give an agent a task and start the agent", example)
    submit.add_argument("agent", metavar="AGENT", help="who is to do it; 'agents list' shows who there is")
    submit.add_argument("description", metavar="DESCRIPTION", help="what is to be done")
    add_request_id(submit, "the same task, not a second one, and tells its token again")
    submit.add_argument(
        "--wait",
        type=duration_s,
        metavar="SECONDS",
        help="wait for the task's end, at most this long (also 5m, 2h), and end as it does",
    )
    submit.add_argument(
        "--show-token", action="store_true", help="print the task's token; --json prints it in any case"
    )
