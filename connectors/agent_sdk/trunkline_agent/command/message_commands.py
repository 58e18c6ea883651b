"""`trunkline-agent send`, `receive` and `ask`, and how the command prints messages."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from trunkline_agent.agent import Agent
from trunkline_agent.command.command_options import (
    add_command,
    at_least,
    credentials_of,
    json_value,
    print_json,
    read_text,
)
from trunkline_agent.command.stop_signals import StopSignals
from trunkline_agent.errors import NotFound, UsageError
from trunkline_agent.hub.agent_plans import PATIENCE_S
from trunkline_agent.hub.held_messages import Held
from trunkline_agent.hub.hub_requests import send_key
from trunkline_agent.hub.message_plans import ask, envelope
from trunkline_agent.hub.plans import Retries
from trunkline_agent.message import Message, ReceivedMessage
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS, duration_s

_SEND: Final = """\
Send a message to another agent, and print its id. The payload is JSON; --text sends {"text": TEXT}.

examples:
  trunkline-agent send planner ask '{"text": "what is next?"}'
  git log -1 | trunkline-agent send planner news --text -
  trunkline-agent send planner tick --text "" --deliver-after 60 --priority low
"""
_ASK: Final = """\
Send a message, wait for the reply to it, print the reply's content, and acknowledge the reply. A reply that was
not printed, or that is late, is in the mailbox. Exit code 5: none came in time.

examples:
  trunkline-agent ask planner ask --text "what is next?"
  trunkline-agent ask planner ask '{"n": 3}' --timeout 120 --json
"""
_RECEIVE: Final = """\
Print the messages in the mailbox, and acknowledge each after it is printed. Ctrl-C ends it; a message that was
not printed comes again. Exit code 3: no message was there.

examples:
  trunkline-agent receive                        all that wait now
  trunkline-agent receive --wait 60 --count 1    the next one, which may take a minute
  trunkline-agent receive --wait 3600 --json | while read -r message; do ...; done
  trunkline-agent receive --no-ack               look, and give all back; each look counts as an attempt
"""
# A reader of the output may be slower: then the reply comes again.
_PRINTED_WITHIN_S: Final = 300
_TEXT: Final = "text"


def add_to(commands: Any) -> None:
    """Add the subcommands `send`, `receive` and `ask`."""
    send = add_command(commands, "send", _send, "send a message", _SEND)
    _add_message(send)
    receive = add_command(commands, "receive", _receive, "print and acknowledge messages", _RECEIVE)
    receive.add_argument("--count", type=at_least(1), metavar="N", help="end after so many (default: none)")
    receive.add_argument(
        "--wait",
        type=duration_s,
        default=0.0,
        metavar="TIME",
        help="how long to wait for the next (default: 0)",
    )
    receive.add_argument("--no-ack", action="store_true", help="give the messages back at the end")
    ask = add_command(commands, "ask", _ask, "send a message and print the reply", _ASK)
    _add_message(ask)
    ask.add_argument(
        "--timeout", type=duration_s, default=30.0, metavar="TIME", help="how long to wait (default: 30)"
    )


def _add_message(found: argparse.ArgumentParser) -> None:
    found.add_argument("to", help="the recipient")
    found.add_argument("type", help="the kind of the message, a word of yours such as ask")
    found.add_argument("payload", nargs="?", help="the content as JSON; - reads standard input")
    found.add_argument("--text", help='the content {"text": TEXT}; - reads standard input')
    for one in MESSAGE_FIELDS:
        found.add_argument(one.option, metavar=one.metavar, help=one.short)
    found.add_argument(
        "--expires-in", type=duration_s, metavar="TIME", help="it ends after so long, as 90, 5m or 2h"
    )
    found.add_argument("--deliver-after", type=duration_s, metavar="TIME", help="delivered after so long")
    found.add_argument("--priority", choices=("low", "normal", "high"))
    found.add_argument("--key", metavar="KEY", help="the idempotency key: the same key is the same message")


def _message_of(given: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the payload and the options of a message. Raises UsageError."""
    if given.text is not None and given.payload is not None:
        raise UsageError("give PAYLOAD or --text, not both")
    if given.text is not None:
        payload: Any = {"text": read_text(given.text)}
    else:
        payload = None if given.payload is None else json_value(given.payload, "PAYLOAD")
    options = {
        **{one.name: getattr(given, one.name) for one in MESSAGE_FIELDS},
        "expires_in_s": given.expires_in,
        "deliver_after_s": given.deliver_after,
        "priority": given.priority,
        "key": given.key,
    }
    return payload, {name: value for name, value in options.items() if value is not None}


def _send(given: argparse.Namespace) -> int:
    payload, options = _message_of(given)
    with Agent(None, credentials_of(given)) as agent:
        sent = agent.send(given.to, given.type, payload, **options)
    if given.json:
        print_json({"message_id": sent.message_id})
    else:
        print(sent.message_id)
    return 0


def _ask(given: argparse.Namespace) -> int:
    payload, options = _message_of(given)
    key = options.pop("key", None)
    body = envelope(given.type, payload, recipient=given.to, **options)
    plan = ask(body, send_key("question", body, key), given.timeout, Retries(PATIENCE_S), _PRINTED_WITHIN_S)
    with Agent(None, credentials_of(given)) as agent, StopSignals() as stop:
        with stop.waiting():
            taken = agent.hub.run(plan)
        reply = Message(agent, taken.messages[0])
        if taken.lease_id is not None:
            reply.held = Held(reply.id, taken.lease_id, _PRINTED_WITHIN_S)
        with reply, stop.waiting():
            if given.json:
                print_json(as_json(reply))
            else:
                print(body_of(reply.payload), flush=True)
        stop.check()
    return 0


def _print(message: Message, given: argparse.Namespace) -> None:
    if given.json:
        print_json(as_json(message))
    else:
        print(line_of(message), flush=True)


def _receive(given: argparse.Namespace) -> int:
    seen = 0
    with Agent(None, credentials_of(given)) as agent, StopSignals() as stop:
        while given.count is None or seen < given.count:
            with stop.waiting():
                message = agent.receive(wait_s=given.wait)
            if message is None:
                break
            seen += 1
            if given.no_ack:
                # Leaving the agent's block gives it back. Earlier, it would come again at once.
                with stop.waiting():
                    _print(message, given)
                continue
            # A signal ends also a print that waits for the reader of the output. The message is given back.
            with message, stop.waiting():
                _print(message, given)
            stop.check()
    if not seen:
        raise NotFound("no message was there")
    return 0


def as_json(message: ReceivedMessage) -> dict[str, Any]:
    """Return a received message as the fields of a JSON object; those that it does not have are None."""
    return {
        "id": message.id,
        "from": message.sender,
        "type": message.type,
        "payload": message.payload,
        "topic": message.topic,
        **{one.name: getattr(message, one.name) for one in MESSAGE_FIELDS},
        "attempt": message.attempt,
    }


def line_of(message: ReceivedMessage) -> str:
    """Return a received message as one line for people: sender, type and payload."""
    return f"{escaped(message.sender)}  {escaped(message.type)}  {escaped(body_of(message.payload))}"


def body_of(payload: Any) -> str:
    """Return a payload as text: the text itself of a payload that is or has only a text, else its JSON."""
    if isinstance(payload, dict) and set(payload) == {_TEXT} and isinstance(payload[_TEXT], str):
        return str(payload[_TEXT])
    return payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
