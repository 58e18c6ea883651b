"""Messages as the command prints them and as it gives them to a program."""

from __future__ import annotations

import json
from typing import Any, Final

from trunkline_agent.message import ReceivedMessage
from trunkline_agent.terminal_text import escaped

_TEXT: Final = "text"


def as_json(message: ReceivedMessage) -> dict[str, Any]:
    """Return a received message as the fields of a JSON object; those that it does not have are None."""
    return {
        "id": message.id,
        "from": message.sender,
        "type": message.type,
        "payload": message.payload,
        "topic": message.topic,
        "thread": message.thread,
        "in_reply_to": message.in_reply_to,
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
