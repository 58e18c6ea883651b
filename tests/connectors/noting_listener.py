"""A listener that notes who told it what; it takes notes of its own kind, and what other doors say."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from connectors.xml_pump import Text, payload
from connectors.xml_pump.handlers import ListenerMessage, handles

FOLDER_VARIABLE = "NOTING_LISTENER_FOLDER"
NOTES = "heard.jsonl"
NOTE, SPACE = "note", "urn:example:notes:1"


@payload(NOTE, namespace=SPACE)
@dataclass(frozen=True)
class Note:
    """Something that was said."""

    said: str


@handles(Note, replies=(Text,))
async def hear(message: ListenerMessage) -> None:
    """Note sender, kind and text."""
    said = message.payload
    kind, text = (said.kind, said.body) if isinstance(said, Text) else (NOTE, said.said)
    with (Path(os.environ[FOLDER_VARIABLE]) / NOTES).open("a") as file:
        file.write(json.dumps([message.sender, kind, text]) + "\n")
