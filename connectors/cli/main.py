"""The command line's frame: finds the command, reads the settings, turns errors into exit codes.

Only the chosen command's module is imported, and `--help` imports none: the standard library alone prints
it, so that it works before anything is set up, and at once.

A command's module offers `configure(parser)` and `run(args, settings) -> exit code`.
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
from typing import TYPE_CHECKING, Protocol, cast

from schemas.errors import TrunklineError, UsageError

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

PROGRAM = "trunkline"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """One command: the module that runs it, what it does in a line, and where the help shows it."""

    module: str
    summary: str
    group: str


class CommandModule(Protocol):
    """What a command's module offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, args: argparse.Namespace, settings: Settings) -> int:
        """Does it and returns the exit code."""


STACK, EVENTS, AGENTS = "The local stack", "Jobs and events", "Agents and who may do what"
WORK = "Trying and measuring"

COMMANDS: dict[str, Command] = {
    "up": Command("connectors.cli.stack.up_command", "start brokers, bridges, gateway, pump, streams", STACK),
    "down": Command("connectors.cli.stack.down_command", "stop them all, in order", STACK),
    "status": Command("connectors.cli.stack.status_command", "show each part's state, age and memory", STACK),
    "logs": Command("connectors.cli.stack.logs_command", "show or follow the parts' logs", STACK),
    "doctor": Command("connectors.cli.doctor.doctor_command", "check every part and say how to mend it", STACK),
    "dashboard": Command(
        "connectors.cli.stack.dashboard_command", "print the address of the page to watch", STACK
    ),
    "settings": Command("connectors.cli.stack.settings_command", "show every setting and its source", STACK),
    "tls": Command("connectors.cli.keys.tls_command", "make certificates for brokers and gateway", STACK),
    "publish": Command("connectors.cli.jobs.publish_command", "publish a job's events", EVENTS),
    "jobs": Command("connectors.cli.jobs.jobs_command", "register, submit, list and show jobs", EVENTS),
    "watch": Command("connectors.cli.jobs.watch_command", "follow jobs to their end", EVENTS),
    "tail": Command("connectors.cli.follow.tail_command", "follow events as they come in", EVENTS),
    "dead-letters": Command(
        "connectors.cli.messages.dead_letters_command", "see what was rejected, replay it", EVENTS
    ),
    "topic": Command(
        "connectors.cli.stack.topic_command", "make the log's topic in a Kafka of your own", EVENTS
    ),
    "fold": Command("connectors.cli.stack.fold_command", "switch on a new version of the rules", EVENTS),
    "log": Command("connectors.cli.stack.log_command", "make a lost log again from the ledger", EVENTS),
    "audit": Command("connectors.cli.stack.audit_command", "check that nobody has changed the ledger", EVENTS),
    "agents": Command(
        "connectors.cli.agents.agents_command", "spawn, join, list, stop agents; their keys", AGENTS
    ),
    "mcp": Command("connectors.cli.agents.mcp_command", "serve MCP on stdio: management, or an agent", AGENTS),
    "tasks": Command("connectors.cli.jobs.tasks_command", "give agents tasks, follow and end them", AGENTS),
    "tokens": Command("connectors.cli.agents.tokens_command", "list and revoke the tokens of tasks", AGENTS),
    "messages": Command(
        "connectors.cli.messages.messages_command", "send, drain, peek, clear, export messages", AGENTS
    ),
    "organism": Command(
        "connectors.cli.organism.organism_command", "show and change the XML pump's listeners", AGENTS
    ),
    "console": Command("connectors.cli.organism.console_command", "sit at the XML pump as a person", AGENTS),
    "sessions": Command(
        "connectors.cli.agents.sessions_command", "create, stop and list agent sessions", AGENTS
    ),
    "monitor": Command("connectors.cli.follow.monitor_command", "follow jobs and sessions, mend drift", AGENTS),
    "keys": Command("connectors.cli.keys.keys_command", "rotate master, agents' and jobs' keys", AGENTS),
    "principals": Command("connectors.cli.agents.principals_command", "make and revoke tokens", AGENTS),
    "demo": Command("connectors.cli.stack.demo_command", "see the whole way of an event, in a minute", WORK),
    "bench": Command("connectors.cli.stack.bench_command", "run a benchmark", WORK),
    "prove": Command("connectors.cli.stack.prove_command", "try to break it: seeds of faults under load", WORK),
}

# What the wrapper does without the command line.
_OF_THE_WRAPPER = {
    AGENTS: {"queue": "a mailbox in files, without the stack: send, poll, tail, expire"},
    WORK: {"test": "run the tests; pytest's arguments may follow"},
}

_EXAMPLES = """\
Begin with: trunkline up   See it work: trunkline demo   Help on one: trunkline COMMAND --help
"""


def top_level_help() -> str:
    """The help of the whole program: one line a command, grouped."""
    lines = [
        f"usage: {PROGRAM} COMMAND [arguments]",
        "Trunkline, an event backbone for multi-agent systems: many doors, one log, one fold.",
    ]
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    for group in groups:
        lines.append(f"{group}:")
        lines += [f"  {name:<14}{c.summary}" for name, c in COMMANDS.items() if c.group == group]
        lines += [f"  {name:<14}{summary}" for name, summary in _OF_THE_WRAPPER.get(group, {}).items()]
    lines += ["", _EXAMPLES]
    return "\n".join(lines)


def _unknown(name: str) -> int:
    close = get_close_matches(name, [*COMMANDS, "queue", "test"], n=1)
    hint = f"Did you mean '{close[0]}'?" if close else f"See {PROGRAM} --help."
    print(f"{PROGRAM}: there is no command '{name}'. {hint}", file=sys.stderr)
    return EXIT_USAGE


def _run_command(name: str, arguments: Sequence[str]) -> int:
    command = COMMANDS[name]
    try:
        module = cast(CommandModule, import_module(command.module))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("connectors", "schemas"):
            raise
        # The wrapper lets only a call for help get here before its set-up.
        print(f"{PROGRAM} {name}: {command.summary}")
        print(f"Its options are shown after the set-up, which './{PROGRAM} demo' begins with.")
        return 0
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    args = parser.parse_args(arguments)
    # Imported here, because pydantic is slow to import and help must be quick.
    from schemas.settings.settings import load_settings

    settings = load_settings()
    try:
        return module.run(args, settings)
    except OSError as error:
        _explain_data_dir(error, getattr(args, "data_dir", None) or settings.data_path)
        raise


def _explain_data_dir(error: OSError, data_path: Path) -> None:
    """Raise UsageError when a file or directory of the data directory cannot be made or read."""
    if error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(data_path):
        return
    raise UsageError(
        f"the data directory {data_path} cannot be used: {error.filename}: {error.strerror}. Set data_dir "
        "(TRUNKLINE__DATA_DIR) to a directory that you may write to and that has room"
    ) from error


def _is_settings_error(error: BaseException) -> bool:
    from schemas.settings.settings import SettingsError

    return isinstance(error, SettingsError)


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
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    said_by = " ".join([PROGRAM, *arguments[:1]])
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except TrunklineError as error:
        print(f"{said_by}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if not _is_settings_error(error):
            raise
        print(f"{said_by}: {error}", file=sys.stderr)
        print("Mend it in conf/trunkline.yaml or in the TRUNKLINE__ variables.", file=sys.stderr)
        return EXIT_USAGE
