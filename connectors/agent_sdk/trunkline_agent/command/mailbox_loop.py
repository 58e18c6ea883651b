"""The mailbox loop of `trunkline-agent run`: a program for each message.

**Delivers** each message to the program at least once: it comes again when it was given back, or when this
process died. **Acknowledges when** the program ended with exit code 0 and its reply is stored. **Loses** no
message.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Final

from trunkline_agent.agent import Agent
from trunkline_agent.command.child_program import ChildProgram, Ended, Limits, environment_with
from trunkline_agent.command.command_options import credentials_of, print_json
from trunkline_agent.command.message_commands import as_json, body_of
from trunkline_agent.command.stop_signals import StopSignals
from trunkline_agent.errors import BackboneUnreachable, LeaseLost, MessageRejected, NotFound
from trunkline_agent.message import Message
from trunkline_agent.terminal_text import escaped

_AWAY_S: Final = 1.0
_MARGIN_S: Final = 60.0


def run_for_messages(given: argparse.Namespace, limits: Limits) -> int:
    """Run the command for each message until `--count`, `--wait` or a signal ends the loop.

    While the hub does not answer, it goes on asking. Returns the exit code. Raises Stopped after a signal, when
    the program has ended and its message is given back, and the errors of the mailbox.
    """
    done = 0
    with StopSignals() as stop, Agent(None, credentials_of(given)) as agent:
        while given.count is None or done < given.count:
            message = _next(agent, given.wait, _longest_s(limits), stop)
            if message is None:
                break
            _handle(message, given, limits, stop)
            done += 1
            stop.check()
    return 0


def _longest_s(limits: Limits) -> float | None:
    """Return how long the lease is extended: the program is ended by its own limit before."""
    return None if limits.time_s is None else limits.time_s + limits.grace_s + _MARGIN_S


def _next(agent: Agent, wait_s: float | None, longest_s: float | None, stop: StopSignals) -> Message | None:
    """Wait for the next message, and return it. None: none came within `wait_s`. A signal ends the wait."""
    is_away = False
    with stop.waiting():
        while True:
            try:
                return agent.receive(wait_s=wait_s, longest_s=longest_s)
            except BackboneUnreachable as error:
                if not is_away:
                    _note(f"{error}; it is asked again and again")
                is_away = True
                time.sleep(_AWAY_S)


def _handle(message: Message, given: argparse.Namespace, limits: Limits, stop: StopSignals) -> None:
    """Run the program for one message, and acknowledge the message or give it back."""
    fault = ""
    try:
        with message:
            ended = _ended(message, given, limits, stop)
            fault = ended.fault or _reply(message, given, ended.output)
            if fault:
                message.nack(fault)
    except (LeaseLost, MessageRejected, NotFound) as error:
        # Another consumer has it, or its sender cannot be answered. There are further messages.
        fault = str(error)
    if given.json:
        shown = {"id": message.id, "from": message.sender, "type": message.type, "fault": fault or None}
        print_json(shown)
    elif fault:
        _note(f"message {message.id} from {message.sender}: {fault}")


def _note(text: str) -> None:
    print(f"trunkline-agent: {escaped(text)}", file=sys.stderr, flush=True)


def _ended(message: Message, given: argparse.Namespace, limits: Limits, stop: StopSignals) -> Ended:
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


def _reply(message: Message, given: argparse.Namespace, output: bytes) -> str:
    """Send the program's output as the reply. Return what is wrong with it, or an empty text."""
    if given.reply == "none" or not output.strip():
        return ""
    try:
        text = output.decode("utf-8")
        payload = json.loads(text) if given.reply == "json" else {"text": text.removesuffix("\n")}
    except (ValueError, RecursionError):
        return "its output is no JSON" if given.reply == "json" else "its output is no UTF-8"
    message.reply(payload)
    return ""
