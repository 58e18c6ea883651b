"""The mailbox loop of `trunkline-agent run`: a program for each message.

**Delivers** each message to the program at least once: it comes again when it was given back, or when this
process died. **Acknowledges when** the program ended with exit code 0 and its reply is stored. **Loses** no
message.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

from trunkline_agent.agent import Agent
from trunkline_agent.command.child_program import ChildProgram, Ended, Limits
from trunkline_agent.command.command_options import credentials_of, print_json
from trunkline_agent.command.program_environment import environment_with
from trunkline_agent.command.shown_messages import as_json, body_of
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


def _ended(message: Any, given: argparse.Namespace, limits: Limits, stop: StopSignals) -> Ended:
    """Run the program to its end."""
    if given.input == "body":
        stdin = body_of(message.payload)
    else:
        stdin = json.dumps(as_json(message), ensure_ascii=False) + "\n"
    values = {
        "TRUNKLINE_MESSAGE_ID": message.id,
        "TRUNKLINE_MESSAGE_FROM": message.sender,
        "TRUNKLINE_MESSAGE_TYPE": message.type,
        "TRUNKLINE_MESSAGE_THREAD": message.thread,
    }
    environment = environment_with(values, has_secrets=given.pass_credentials)
    # A lone surrogate, which JSON can carry, is no UTF-8.
    data = stdin.encode("utf-8", "replace")
    return ChildProgram(given.command, data, limits, environment).run(stop)


def _reply(message: Any, given: argparse.Namespace, output: bytes) -> None:
    """Send the program's output as the reply. Raises _GivenBack for an output that cannot be one."""
    if given.reply == "none" or not output.strip():
        return
    try:
        text = output.decode("utf-8")
        payload = json.loads(text) if given.reply == "json" else {"text": text.removesuffix("\n")}
    except (ValueError, RecursionError):
        wanted = "JSON" if given.reply == "json" else "UTF-8"
        raise _GivenBack(f"its output is no {wanted}") from None
    message.reply(payload)
