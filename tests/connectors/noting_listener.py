"""Listeners that note who told them what, that answer, and that ask another one before they answer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from connectors.doors.xml_pump import Text, payload, to_xml
from connectors.doors.xml_pump.handlers import HandlerContext, ListenerMessage, handles

FOLDER_VARIABLE = "NOTING_LISTENER_FOLDER"
NOTES = "heard.jsonl"
NOTE, SPACE = "note", "urn:example:notes:1"


@payload(NOTE, namespace=SPACE)
@dataclass(frozen=True)
class Note:
    """Something that was said."""

    said: str


@handles(Note, replies=(Text,))
async def hear(message: ListenerMessage, context: HandlerContext) -> None:
    """Note sender, kind and text, the answered message and the thread."""
    said = message.payload
    kind, text = (said.kind, said.body) if isinstance(said, Text) else (NOTE, said.said)
    with (Path(os.environ[FOLDER_VARIABLE]) / NOTES).open("a") as file:
        answered = (await context.history())[-1].in_reply_to
        file.write(json.dumps([message.sender, kind, text, answered, message.thread]) + "\n")


@payload("query", namespace=SPACE)
@dataclass(frozen=True)
class Query:
    """A question."""

    asked: str


@payload("relayed", namespace=SPACE)
@dataclass(frozen=True)
class Relayed:
    """A question for another listener."""

    asked: str


@handles(Query, replies=(Text,))
async def answer(message: ListenerMessage) -> bytes:
    """Answer each question."""
    return to_xml(Text("answer", "42"))


@handles(Relayed, replies=(Text,))
async def relay(message: ListenerMessage) -> bytes:
    """Ask the one that answers, and pass its answer on."""
    return to_xml(message.payload if message.is_reply else Query("what is it?"))
