"""Handlers of the pump's tests. They write notes to the folder that the environment names."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.doors.xml_pump import payload, to_xml
from connectors.doors.xml_pump.handlers import HandlerContext, ListenerMessage, handles
from connectors.doors.xml_pump.listener_table import ChatMessage, Completion, ToolCall

FOLDER_VARIABLE = "PUMP_TEST_FOLDER"
SPACE = "urn:example:pump:1"
RELEASE = "release"
WORK_S = 0.03


@payload("search", namespace=SPACE)
@dataclass
class Search:
    """Words to look for."""

    query: str


@payload("found", namespace=SPACE)
@dataclass
class Found:
    """A result."""

    source: str


@payload("begin", namespace=SPACE)
@dataclass
class Begin:
    """Ask the others."""

    query: str = "anything"


@payload("heard", namespace=SPACE)
@dataclass
class Heard:
    """A message from one of the others."""

    source: str


@payload("rough", namespace=SPACE)
@dataclass
class Rough:
    """Do something that no handler should."""

    how: str


@payload("work", namespace=SPACE)
@dataclass
class Work:
    """Something to do."""

    number: int


@payload("worked", namespace=SPACE)
@dataclass
class Worked:
    """It is done."""

    number: int
    tools: list[str] = field(default_factory=list)


def folder() -> Path:
    """Where the tests look."""
    return Path(os.environ[FOLDER_VARIABLE])


def note(what: str, **fields: Any) -> None:
    """One line in one write, so that many processes may note at once."""
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **fields}) + "\n"
    with (folder() / f"{what}.jsonl").open("ab", buffering=0) as file:
        file.write(line.encode())


def note_message(what: str, message: ListenerMessage) -> None:
    """The arguments of a handler."""
    seen = {"sender": message.sender, "verified": message.sender_verified, "thread": message.thread}
    note(what, **seen, root_tag=message.root_tag, is_reply=message.is_reply, xml=message.xml.decode())


@handles(Search)
async def fast(message: ListenerMessage) -> bytes:
    """Answers at once."""
    note_message("fast", message)
    return to_xml(Found("fast"))


@handles(Search)
async def slow(message: ListenerMessage) -> bytes:
    """Answers when the test lets it."""
    note_message("slow", message)
    while not (folder() / RELEASE).exists():
        await asyncio.sleep(0.02)
    note("slow_done")
    return to_xml(Found("slow"))


@handles(Begin, replies=[Found])
async def relay(message: ListenerMessage) -> bytes:
    """Asks everybody who searches, and passes each answer on as it comes."""
    note_message("relay", message)
    if isinstance(message.payload, Begin):
        return to_xml(Search(message.payload.query))
    if isinstance(message.payload, Found):
        return to_xml(Heard(message.payload.source))
    return to_xml(Heard(f"{message.root_tag} of {message.sender}"))


async def failing() -> None:
    """A task of a handler's own."""
    raise ValueError("a secret that nobody is to see")


@handles(Rough)
async def rough(message: ListenerMessage) -> Any:
    """Fails in the way that it is told."""
    how = message.payload.how
    note("rough", how=how)
    if how == "raise":
        raise ValueError("a secret that nobody is to see")
    if how == "exit":
        raise SystemExit(3)
    if how == "hang":
        await asyncio.sleep(3600)
    if how == "die" or (how == "ill" and not (folder() / RELEASE).exists()):
        os._exit(9)
    if how == "block":
        time.sleep(3600)
    if how == "stubborn":
        while not (folder() / RELEASE).exists():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                note("stubborn")
        raise ValueError("a secret that nobody is to see")
    if how == "task":
        asyncio.create_task(failing())  # noqa: RUF006  nobody waits for it
        await asyncio.sleep(0.05)
        gc.collect()
    rubbish: dict[str, Any] = {
        "text": b"I think the answer is 42",
        "type": "a string",
        "large": b'<big xmlns="urn:example:big">' + b"x" * 400_000 + b"</big>",
        "doctype": b'<!DOCTYPE a [<!ENTITY b "c">]><a xmlns="urn:example:a">&b;</a>',
        "many": b'<a xmlns="urn:example:a"/>' * 101,
    }
    return rubbish.get(how, to_xml(Worked(1)))


@handles(Work)
async def work(message: ListenerMessage, context: HandlerContext) -> bytes:
    """Notes its beginning and its end."""
    number = message.payload.number
    note("began", number=number)
    await asyncio.sleep(WORK_S)
    note("ended", number=number)
    return to_xml(Worked(number, [str(tool["name"]) for tool in context.tools]))


class Improviser:
    """A language model that calls somebody whom it was not given."""

    async def complete(
        self,
        model: str,
        system_prompt: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Completion:
        """Call a stranger first; then report what came back."""
        note("model", tools=[tool["name"] for tool in tools], roles=[one.role for one in messages])
        last = messages[-1]
        if last.role == "user":
            return Completion(calls=[ToolCall("worker", {"number": 7})], tokens=10)
        return Completion(text=f"{last.name} said {last.content}", tokens=10)
