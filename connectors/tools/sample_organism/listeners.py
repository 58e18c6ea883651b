"""The sample's listeners: their payloads, and a handler for each of them.

The calculator takes `<calculate>`. Two listeners take `<search>`, a fast one with few titles and a slow one
with more. Another one writes a log line at each start of the pump, which sends `<boot/>` then. The client of a
language model that the researcher uses has no model: it always follows the same script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any, Final, Literal
from xml.sax.saxutils import escape

import structlog

from connectors.doors.xml_pump.handlers import ListenerMessage, handles
from connectors.doors.xml_pump.listener_table import ChatMessage, Completion, ToolCall
from connectors.plumbing.xml_payloads.payload_types import payload, to_xml

NAMESPACE = "urn:trunkline:sample:1"


@payload("calculate", namespace=NAMESPACE)
@dataclass(frozen=True)
class Calculate:
    """Two numbers and an operation."""

    operation: Literal["add", "subtract", "multiply", "divide"]
    first: Decimal
    second: Decimal


@payload("result", namespace=NAMESPACE)
@dataclass(frozen=True)
class Result:
    """The result of a calculation."""

    value: Decimal


@payload("search", namespace=NAMESPACE)
@dataclass(frozen=True)
class Search:
    """Words to look for."""

    query: str = field(metadata={"description": "the words, separated by spaces"})


@payload("found", namespace=NAMESPACE)
@dataclass(frozen=True)
class Found:
    """The titles that one source has found."""

    source: str
    titles: list[str] = field(default_factory=list)


@payload("boot", namespace=NAMESPACE)
@dataclass(frozen=True)
class Boot:
    """The pump has started."""


_NUMBERS = Context(prec=28)


@handles(Calculate)
async def calculate(message: ListenerMessage) -> bytes:
    """Calculate with the two numbers of a `<calculate>`, and return the `<result>` as XML.

    The payload's operation is add, subtract, multiply or divide. A division by zero raises a decimal exception.
    The pump then answers the sender with a `<huh>`.
    """
    asked: Calculate = message.payload
    first, second = asked.first, asked.second
    value: Decimal = getattr(_NUMBERS, asked.operation)(first, second)
    return to_xml(Result(value))


# The duration of a search in the archive.
ARCHIVE_S = 1.0
_INDEX = ("The log and its fold", "A mailbox for each agent", "Leases and who holds them")
_ARCHIVE = (*_INDEX, "How the log came to be", "What a mailbox costs", "Messages of ten years")


@handles(Search)
async def index(message: ListenerMessage) -> bytes:
    """Return, as XML `<found>`, the titles in the index with one of the words of a `<search>`. Does not wait.

    Without a matching title, the `<found>` has no titles.
    """
    return to_xml(Found("index", _with_words(_INDEX, message.payload.query)))


@handles(Search)
async def archive(message: ListenerMessage) -> bytes:
    """Return, as XML `<found>`, the titles in the archive with one of the words of a `<search>`, after 1 s.

    Without a matching title, the `<found>` has no titles.
    """
    await asyncio.sleep(ARCHIVE_S)
    return to_xml(Found("archive", _with_words(_ARCHIVE, message.payload.query)))


def _with_words(titles: tuple[str, ...], query: str) -> list[str]:
    words = query.casefold().split()
    return [title for title in titles if any(word in title.casefold() for word in words)]


log = structlog.stdlib.get_logger(__name__)


@handles(Boot)
async def note_start(message: ListenerMessage) -> None:
    """Write a log line that the pump has started, when the pump sends `<boot/>`.

    Returns None, which means no answer, because no listener waits for one.
    """
    log.info("booted", thread=message.thread)


_CALCULATOR: Final = "calculator"
_SUM: Final = {"operation": "multiply", "first": "6", "second": "7"}
_WORDS: Final = {"query": "log mailbox"}
_TOKENS: Final = 100


class ScriptedClient:
    """A stand-in for a client of a language model, for the sample's listener `researcher`."""

    async def complete(
        self,
        model: str,
        system_prompt: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Completion:
        """Return the next step of a fixed script, as a language model would complete the conversation.

        The step depends on the messages since the last one of role `user`. First come the calls of all `tools`.
        After the answers of all tools comes the text of a `<report>`. While answers are missing, and after the
        report, the completion is empty. `model` and `system_prompt` are ignored.
        """
        names = [str(tool["name"]) for tool in tools]
        last_question = max((n for n, one in enumerate(messages) if one.role == "user"), default=0)
        since = messages[last_question + 1 :]
        answers = {one.name: one.content for one in since if one.role == "tool"}
        if not any(one.role in ("assistant", "tool") for one in since) and names:
            calls = [ToolCall(name, _SUM if name == _CALCULATOR else _WORDS) for name in names]
            return Completion(calls=calls, tokens=_TOKENS)
        if set(answers) >= set(names) and not any(
            f'<report xmlns="{NAMESPACE}"' in one.content for one in since
        ):
            return Completion(text=_report(answers), tokens=_TOKENS)
        return Completion(tokens=_TOKENS)


def _report(answers: Mapping[str, str]) -> str:
    said = "".join(
        f'<finding by="{escape(name)}">{escape(answers[name])}</finding>' for name in sorted(answers)
    )
    return f'<report xmlns="{NAMESPACE}">{said}</report>'
