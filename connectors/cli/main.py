"""The command line's entry: finds the command, reads the settings, turns errors into exit codes.

Only the module of the chosen command is imported. `--help` imports none and needs the standard library alone,
so that it is fast and works before the set-up.

A command's module offers a table of actions `ACTIONS` (see `connectors.cli.shared.actions`), or its `ARGUMENTS`
and a function `run(call)`, which returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from connectors.cli.shared.actions import add_actions
from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.terminal_text import drop_output, output_fault, prepare_output

PROGRAM = "trunkline"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """One command of `trunkline`.

    Attributes:
        module: The module to import for the command.
        summary: A line about the command for `trunkline --help`.
        group: The heading in the help below which the command is listed.
    """

    module: str
    summary: str
    group: str


STACK, EVENTS, AGENTS = "The local stack", "Jobs and events", "Agents and who may do what"
WORK = "Trying and measuring"


def _in(name: str, summary: str, group: str) -> Command:
    return Command(f"connectors.cli.{name}_command", summary, group)


COMMANDS: dict[str, Command] = {
    "up": _in("stack.up", "start brokers, bridges, gateway, pump, streams", STACK),
    "down": _in("stack.down", "stop them all, in order", STACK),
    "run": _in("stack.run", "run one part in the foreground, for systemd", STACK),
    "install": _in("stack.install", "write systemd units of the parts", STACK),
    "status": _in("stack.status", "show each part's state, age and memory", STACK),
    "logs": _in("stack.logs", "show or follow the parts' logs", STACK),
    "doctor": _in("doctor.doctor", "check every part and say how to repair it", STACK),
    "dashboard": _in("stack.dashboard", "print the address of the dashboard", STACK),
    "settings": _in("stack.settings", "show every setting and its source", STACK),
    "tls": _in("keys.tls", "make certificates for brokers and gateway", STACK),
    "publish": _in("jobs.publish", "publish a job's events", EVENTS),
    "jobs": _in("jobs.jobs", "register, submit, list and show jobs", EVENTS),
    "watch": _in("jobs.watch", "follow jobs to their end", EVENTS),
    "tail": _in("follow.tail", "follow events as they come in", EVENTS),
    "dead-letters": _in("messages.dead_letters", "show rejected records, dead messages; replay", EVENTS),
    "fold": _in("stack.fold", "switch to a new version of the rules", EVENTS),
    "upgrade": _in("stack.upgrade", "bring an earlier version's data directory over", STACK),
    "log": _in("stack.log", "make the log's topic; rebuild it from the ledger", EVENTS),
    "tables": _in("stack.tables", "register the tables for Spark SQL", EVENTS),
    "audit": _in("stack.audit", "check that the ledger was not changed", EVENTS),
    "agents": _in("agents.agents", "spawn, join, list, stop agents; their keys", AGENTS),
    "mcp": _in("agents.mcp", "serve MCP on stdio: management, or an agent", AGENTS),
    "tasks": _in("jobs.tasks", "give agents tasks, follow and end them", AGENTS),
    "tokens": _in("agents.tokens", "list and revoke the tokens of tasks", AGENTS),
    "messages": _in("messages.messages", "send, take, lease, follow and show messages", AGENTS),
    "topics": _in("messages.topics", "publish to subscribers; subscribe, list, show", AGENTS),
    "schedules": _in("messages.schedules", "post messages by cron or interval", AGENTS),
    "webhooks": _in("messages.webhooks", "call an address with each message", AGENTS),
    "organism": _in("organism.organism", "show and change the XML pump's listeners", AGENTS),
    "console": _in("organism.console", "take part in the XML pump as a person", AGENTS),
    "sessions": _in("agents.sessions", "create, stop and list agent sessions", AGENTS),
    "monitor": _in("follow.monitor", "follow jobs and sessions, repair drift", AGENTS),
    "keys": _in("keys.keys", "rotate master, agents' and jobs' keys", AGENTS),
    "principals": _in("agents.principals", "make and revoke tokens; set limits", AGENTS),
    "demo": _in("stack.demo", "see the whole way of an event, in a minute", WORK),
    "bench": _in("stack.bench", "run a benchmark", WORK),
    "build": _in("stack.build", "build the library for agents' machines", WORK),
    "prove": _in("stack.prove", "test with seeds of faults under load", WORK),
    "conformance": _in("stack.conformance", "check a client in any language", WORK),
}

# Commands of the wrapper script, which do not reach this program.
_OF_THE_WRAPPER = {
    AGENTS: {"queue": "a mailbox in files, without the stack: send, poll, tail, expire"},
    WORK: {
        "check": "format, lint, types and the tests without brokers",
        "test": "run all tests; pytest's arguments may follow",
    },
}


def top_level_help() -> str:
    """Return the text of `trunkline --help`: one line for each command, in groups."""
    lines = [
        f"usage: {PROGRAM} COMMAND [arguments]",
        "An event backbone for agents. Begin with: trunkline up   Help on one: trunkline COMMAND --help",
    ]
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    for group in groups:
        lines.append(f"{group}:")
        lines += [f"  {name:<14}{c.summary}" for name, c in COMMANDS.items() if c.group == group]
        lines += [f"  {name:<14}{summary}" for name, summary in _OF_THE_WRAPPER.get(group, {}).items()]
    return "\n".join([*lines, ""])


def _unknown(name: str) -> int:
    close = get_close_matches(name, [*COMMANDS, "queue", "check", "test"], n=1)
    hint = f"Did you mean '{close[0]}'?" if close else f"See {PROGRAM} --help."
    print(f"{PROGRAM}: there is no command '{name}'. {hint}", file=sys.stderr)
    return EXIT_USAGE


def parser_of(name: str) -> argparse.ArgumentParser:
    """Import the module of the command `name`, one of `COMMANDS`, and return the command's parser.

    The arguments that the parser returns have the attribute `run`, the function that runs the command. Raises
    KeyError for an unknown command.
    """
    module: Any = import_module(COMMANDS[name].module)
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if hasattr(module, "ACTIONS"):
        add_actions(parser, module.ACTIONS)
    else:
        for add in module.ARGUMENTS:
            add(parser)
        parser.set_defaults(run=module.run)
    return parser


def _run_command(name: str, arguments: Sequence[str]) -> int:
    try:
        parser = parser_of(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("connectors", "schemas"):
            raise
        # Packages are missing: before the set-up, the wrapper starts this program for help only.
        print(f"{PROGRAM} {name}: {COMMANDS[name].summary}")
        print(f"Its options are shown after the set-up, which './{PROGRAM} demo' begins with.")
        return 0
    from connectors.cli.shared.call import Call

    call = parser.parse_args(arguments, Call())
    # Imported here, because pydantic is slow to import and help must be quick.
    from schemas.settings.settings import load_settings

    call.settings = load_settings()
    try:
        code: int = call.run(call)
        return code
    except OSError as error:
        _explain_data_dir(error, getattr(call, "data_dir", None) or call.settings.data_path)
        raise


def _explain_data_dir(error: OSError, data_path: Path) -> None:
    """Raise UsageError when a file or directory of the data directory cannot be made or read."""
    if error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(data_path):
        return
    raise UsageError(
        f"the data directory {data_path} cannot be used: {error.filename}: {error.strerror}. Set data_dir "
        "(TRUNKLINE__DATA_DIR) to a directory that you may write to and that has room"
    ) from error


def _dispatch(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first == "help" and len(arguments) > 1 and arguments[1] in COMMANDS:
        return _run_command(arguments[1], ["--help"])
    if first in {"-h", "--help", "help"}:
        print(top_level_help(), end="")
        return 0
    if first not in COMMANDS:
        return _unknown(first)
    return _run_command(first, arguments[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `trunkline` and return its exit code.

    A known error (TrunklineError, SettingsError) is printed on standard error and becomes the exit code. Ctrl-C
    gives 130. Any other error is raised.

    Args:
        argv: The arguments after the program's name; None for those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    prefix = " ".join([PROGRAM, *arguments[:1]])
    try:
        prepare_output()
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        drop_output()
        return EXIT_INTERRUPTED
    except TrunklineError as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            drop_output()  # otherwise Python reports it again at its exit, with another exit code
        return error.exit_code
    except Exception as error:
        if isinstance(error, OSError) and (why := output_fault(error)) is not None:
            if why:
                print(f"{prefix}: {why}", file=sys.stderr)
            return 1 if why else 0
        from schemas.settings.settings import SettingsError

        if not isinstance(error, SettingsError):
            raise
        print(f"{prefix}: {error}", file=sys.stderr)
        print("Correct it in conf/trunkline.yaml or in the TRUNKLINE__ variables.", file=sys.stderr)
        return EXIT_USAGE
