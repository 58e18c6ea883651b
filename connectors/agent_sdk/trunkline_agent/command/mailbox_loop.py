"""The mailbox loop of `trunkline-agent run`: a program for each message.

**Delivers** each message to the program at least once: it comes again when it was given back, or when this process
died. **Acknowledges when** the program ended with exit code 0 and its reply is stored. **Loses** no message.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from trunkline_agent.agent import Agent
from trunkline_agent.command.child_program import Limits
from trunkline_agent.command.command_options import credentials_of, print_json
from trunkline_agent.command.stop_signals import StopSignals
from trunkline_agent.errors import LeaseLost, MessageRejected
from trunkline_agent.terminal_text import escaped

_REASON_MOST: Final = 500


class _GivenBack(Exception):
    """The program failed. The text goes with the message that is given back."""


def run_for_messages(given: argparse.Namespace, limits: Limits) -> int:
    """Run the command for each message until `--count`, `--wait` or a signal ends the loop.

    Returns the exit code. Raises Stopped after a signal, when the program has ended and its message is given
    back, and the errors of the mailbox.
    """
    done = 0
    with StopSignals() as stop, Agent(None, credentials_of(given)) as agent:
        messages = agent.messages(limit=1, wait_s=given.wait)
        while given.count is None or done < given.count:
            with stop.waiting():
                message = next(messages, None)
            if message is None:
                break
            _handle(message, given, limits, stop)
            done += 1
            stop.check()
    return 0


def _handle(message: Any, given: argparse.Namespace, limits: Limits, stop: StopSignals) -> None:
    """Run the program for one message, and acknowledge the message or give it back."""
    outcome = "acknowledged"
    try:
        with message:
            ended = _ended(message, given, limits, stop)
            if not ended.is_good:
                raise _GivenBack(ended.fault)
            _reply(message, given, ended.output)
    except _GivenBack as fault:
        outcome = f"given back: {fault}"
    except (LeaseLost, MessageRejected) as error:
        outcome = f"not settled: {error}"
    if given.json:
        print_json({"id": message.id, "from": message.sender, "type": message.type, "outcome": outcome})
    elif outcome != "acknowledged":
        print(f"trunkline-agent: message {message.id} {escaped(outcome)}", file=sys.stderr, flush=True)
