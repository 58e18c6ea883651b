"""The command `trunkline-agent`: an agent or a job from the shell."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Final

from trunkline_agent.command import mcp_command, message_commands, publish_command, run_command
from trunkline_agent.command.stop_signals import Stopped
from trunkline_agent.errors import TrunklineError
from trunkline_agent.terminal_text import drop_output, escaped, output_fault, prepare_output

PROGRAM: Final = "trunkline-agent"
_HELP: Final = """\
Take part in a Trunkline from the shell: as an agent with a mailbox, or as the publisher of a job.

examples:
  export TRUNKLINE_CREDENTIALS=builder.json      './trunkline agents join' writes this file
  trunkline-agent send planner ask '{"text": "what is next?"}'
  trunkline-agent ask planner ask --text "what is next?" --timeout 60
  trunkline-agent receive --wait 60
  trunkline-agent run -- ./answer.sh             the message on stdin, the reply from stdout
  trunkline-agent publish progress "half done"   an event of the job that TRUNKLINE_JOB_ID names
  trunkline-agent run --job -- make all          started, each line as progress, completed or error
  trunkline-agent mcp                            an MCP server on stdio, for the configuration of an MCP host
"""
_CODES: Final = """\
Credentials come from --credentials FILE, else from TRUNKLINE_CREDENTIALS (a file), else from TRUNKLINE_HUB_URL
and TRUNKLINE_AGENT_TOKEN. No option takes a secret, because other users see the arguments of a process.

exit codes: 0 ok; 1 failed; 2 wrong usage; 3 not found; 4 refused; 5 nothing answers; 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The parsed arguments have the function `run`."""
    found = argparse.ArgumentParser(
        prog=PROGRAM,
        description=_HELP,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = found.add_subparsers(required=True, metavar="COMMAND")
    for module in (publish_command, message_commands, run_command, mcp_command):
        module.add_to(commands)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return its exit code.

    Errors are printed on stderr: a line of text, with `--json` a JSON object.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        prepare_output()
    except TrunklineError as error:
        _complain(error, as_json=False)
        return error.exit_code
    # All behind the first `--` is another program's command line.
    at = given.index("--") if "--" in given else len(given)
    parsed = parser().parse_args(given[:at])
    parsed.command = given[at + 1 :]
    try:
        if parsed.command and not parsed.takes_command:
            parser().error("only 'run' takes a command behind --")
        code: int = parsed.run(parsed)
        sys.stdout.flush()
        return code
    except TrunklineError as error:
        _complain(error, as_json=parsed.json)
        return error.exit_code
    except Stopped as stopped:
        drop_output()
        return stopped.exit_code
    except KeyboardInterrupt:
        drop_output()
        return 130
    except OSError as error:
        why = output_fault(error)
        if why is None:
            raise
        if why:
            _complain(TrunklineError(why), as_json=parsed.json)
        return 1


def _complain(error: TrunklineError, *, as_json: bool) -> None:
    if as_json:
        shown = {"reason": error.reason, "message": str(error), "exit_code": error.exit_code}
        print(json.dumps({"error": shown}), file=sys.stderr, flush=True)
    else:
        print(f"{PROGRAM}: {escaped(str(error))}", file=sys.stderr, flush=True)
