"""The delivery of one message to its listener: run its handler, and answer each failure (XP-08, XP-13).

A handler that raises, takes too long or answers with unusable XML leads to a `<huh>` to the sender. The log
names a message by its id and never quotes its content.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import orjson
import structlog

from connectors.doors.xml_pump.handlers import HandlerContext, HistoryReader, ListenerMessage
from connectors.doors.xml_pump.listener_table import LLM, META, ListenerTable, RunnableListener
from connectors.doors.xml_pump.pipeline import TEXT_TAG, Pipeline
from connectors.doors.xml_pump.special_listeners import answer_llm, answer_meta
from connectors.plumbing.xml_payloads.deliveries import (
    HANDLED,
    HUH,
    NACK,
    Answer,
    AnswerFault,
    Done,
    LeasedMessage,
    payloads_of,
)
from connectors.plumbing.xml_payloads.huh import HUH_NAMESPACE, HUH_TAG, huh
from connectors.plumbing.xml_wire.documents import Faulty, XmlLimits, XmlRefused
from connectors.plumbing.xml_wire.envelope import text_payload
from connectors.plumbing.xml_wire.safe_xml import canonical_bytes, repair
from schemas.streams.mailboxes.message_text import shown_text

log = structlog.stdlib.get_logger(__name__)

# The root tag of a text, after comments and declarations. Atomic groups, so that no text makes it slow.
_ROOT_TAG: Final = re.compile(
    r"(?>\s+|<\?.*?\?>|<!--.*?-->)*+<(?:[\w.-]+:)?([A-Za-z_][\w.-]*)", re.ASCII | re.DOTALL
)
_XML: Final = "application/xml"
# The time that a cancelled handler has to clean up.
_CANCEL_S: Final = 1.0


class Delivered(NamedTuple):
    """The result of a delivery.

    Attributes:
        done: The outcome to report to the gateway, with the answers.
        stray: The asyncio task of a handler that still runs although it was cancelled after its time limit.
            None: no such handler.
    """

    done: Done
    stray: asyncio.Task[Any] | None = None


class _HandlerFailed(Exception):
    """A handler failed. `why` is the text for the sender, without the handler's own words."""

    def __init__(self, why: str, stray: asyncio.Task[Any] | None = None) -> None:
        super().__init__(why)
        self.stray = stray


class _ExitRaised(Exception):
    """A handler raised an exception that would end the program; the text is its name."""


class Dispatcher:
    """The part of a pump that runs the handler, or the language model, of one message's listener.

    Args:
        reader: The source of earlier messages of a conversation, for handlers that ask for them.
        system_pipeline: The pipeline for payloads that no listener's class describes.
        limits: The limits for the XML of messages and answers.
        answer_bytes: The largest size, in bytes, of an outcome with all its answers as JSON.
        spent: Called with the name of a language model's listener and the number of tokens that one answer
            took.
    """

    def __init__(
        self,
        reader: HistoryReader,
        system_pipeline: Pipeline,
        limits: XmlLimits,
        answer_bytes: int,
        spent: Callable[[str, int], None] = lambda listener, tokens: None,
    ) -> None:
        self._reader = reader
        self._system = system_pipeline
        self._limits = limits
        self._answer_bytes = answer_bytes
        self._spent = spent

    async def deliver(self, message: LeasedMessage, table: ListenerTable) -> Delivered:
        """Check the message's payload, run its listener, and return the outcome to report to the gateway.

        Waits for the handler, at most `message.timeout_ms` and a second. The outcome is `handled` with the
        answers of the listener. It is `huh`, with an error message to the sender, for a faulty message, a
        failed handler, a timeout or a removed listener. It is `nack` when `table` cannot run the listener: the
        message then goes back to its mailbox. Raises nothing but CancelledError, when the caller's asyncio task
        is cancelled.
        """
        if message.is_orphan:
            why = "the listener was removed before it handled your message"
            return Delivered(_huh(message, why, "routing", message.kind))
        listener = table.runnable.get(message.listener)
        if listener is None:
            return Delivered(Done(message, NACK, "the listener cannot be loaded here"))
        about = message.kind
        try:
            found = self._payload(message, listener)
            about = found[0] if found is not None else about
            taken = self._taken(message, listener, found)
            answers = await self._answers(message, taken, listener, table)
            done = Done(message, HANDLED, answers=answers)
            size = len(orjson.dumps(done.as_json()))
            if size > self._answer_bytes:
                raise AnswerFault(f"its answer is too large: {size} bytes, at most {self._answer_bytes}")
            return Delivered(done)
        except Faulty as fault:
            return Delivered(_huh(message, fault, fault.step, about))
        except XmlRefused as error:
            return Delivered(_huh(message, f"the payload is {error.reason}: {error}", "payload", about))
        except AnswerFault as error:
            log.warning("answer_unusable", listener=message.listener, message_id=message.message_id)
            return Delivered(_huh(message, f"the listener {message.listener} failed: {error}", "answer", about))
        except _HandlerFailed as error:
            why = f"the listener {message.listener} failed: {error}"
            return Delivered(_huh(message, why, "handler", about), error.stray)
        except Exception as error:  # noqa: BLE001  an internal error must not end the pump, and its text may quote the message
            name = type(error).__name__
            log.error("delivery_failed", message_id=message.message_id, error=name, place=_place(error))
            return Delivered(_huh(message, f"the pump itself failed with {name}", "pump", about))

    def _taken(
        self, message: LeasedMessage, listener: RunnableListener, found: tuple[str, bytes] | None
    ) -> ListenerMessage:
        """Return the message as the listener gets it; `found` is from `_payload`. Raises Faulty, XmlRefused."""
        text, _ = shown_text(message.body, message.content_type)
        tag, payload = found or (TEXT_TAG, text_payload(message.kind, text))
        pipelines = [listener.reply_pipelines, listener.pipelines]
        if not message.is_reply:
            pipelines.reverse()
        pipeline = next((found[tag] for found in pipelines if tag in found), None)
        if pipeline is not None:
            value = pipeline.run_payload(payload)
        elif listener.kind is None or message.is_reply or (tag == HUH_TAG and message.kind == HUH_TAG):
            # No class describes the payload: a reply, a <huh>, or any message for a listener without a class
            # (XP-10).
            self._system.run_payload(payload)
            value = None
        else:
            # The listener's own pipeline reports the fault.
            value = next(iter(listener.pipelines.values())).run_payload(payload)
        return ListenerMessage(
            value, payload, tag, message.sender, message.sender_verified, message.thread, message.is_reply
        )

    def _payload(self, message: LeasedMessage, listener: RunnableListener) -> tuple[str, bytes] | None:
        """Return root tag and canonical bytes of the payload; None for a text of another door.

        A text is a payload if it is an element that the listener takes. The kind that its door gave it does not
        count: the kind of an MCP message is always `message`, that of a file a topic.
        """
        if message.content_type == _XML:
            return message.kind, message.body.encode("utf-8", "replace")
        text = _text_of(message.body)
        first = _ROOT_TAG.match(text)
        if first is None or first[1] not in {listener.info.root_tag, *listener.reply_pipelines}:
            return None
        try:
            root = repair(text.encode("utf-8", "replace"), self._limits, root_tag=first[1]).root
            is_payload = root.tag.rpartition("}")[2] == first[1]
            return (first[1], canonical_bytes(root)) if is_payload else None
        except (XmlRefused, ValueError):
            return None

    async def _answers(
        self, message: LeasedMessage, taken: ListenerMessage, listener: RunnableListener, table: ListenerTable
    ) -> Sequence[Answer]:
        info = listener.info
        if info.type == META:
            return answer_meta(info, taken, table.listeners, self._limits)
        context = HandlerContext(info.name, message.thread, table.tools_of(info), self._reader)
        if info.type == LLM:
            asked = answer_llm(listener, taken, message.message_id, context, table, self._limits)
            answers, tokens = await _bounded(asked, message)
            self._spent(info.name, tokens)
            return list(answers)
        handler = listener.handler
        assert handler is not None  # noqa: S101  listeners of this type have a handler
        arguments = (taken, context) if handler.wants_context else (taken,)
        return payloads_of(await _bounded(handler.function(*arguments), message), self._limits)


async def _bounded(asked: Awaitable[Any], message: LeasedMessage) -> Any:
    """Return the result of a listener's code within its time limit. Raises _HandlerFailed, AnswerFault."""
    task = asyncio.create_task(_guarded(asked), name=task_name(message))
    task.add_done_callback(_retrieve_exception)
    try:
        await asyncio.wait({task}, timeout=message.timeout_ms / 1000)
        if not task.done():
            log.warning("handler_timeout", listener=message.listener, message_id=message.message_id)
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)
            stray = None if task.done() else task
            raise _HandlerFailed(f"no answer within {message.timeout_ms / 1000:g} s", stray)
    except asyncio.CancelledError:
        task.cancel()
        raise
    failure = asyncio.CancelledError() if task.cancelled() else task.exception()
    if failure is None:
        return task.result()
    if isinstance(failure, AnswerFault):
        raise failure
    name = str(failure) if isinstance(failure, _ExitRaised) else type(failure).__name__
    where = {"listener": message.listener, "message_id": message.message_id}
    log.warning("handler_failed", **where, error=name, place=_place(failure))
    raise _HandlerFailed(f"it raised {name}")


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Read the task's exception. Otherwise asyncio would log it with all its text."""
    if not task.cancelled():
        task.exception()


async def _guarded(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # These exceptions would end the event loop and all other handlers.
        raise _ExitRaised(type(error).__name__) from None


def task_name(message: LeasedMessage) -> str:
    """Return the name for the asyncio task that runs a message's handler. It contains listener and time limit.

    The watchdog reads the name with `limit_in`.
    """
    return f"handler/{message.listener}/{message.timeout_ms}"


def limit_in(name: str) -> tuple[float, str] | None:
    """Return the time limit in seconds and the listener from an asyncio task's name that `task_name` made.

    None means that another function made `name`, so the asyncio task runs no handler.
    """
    kind, _, rest = name.partition("/")
    listener, _, timeout_ms = rest.rpartition("/")
    return (int(timeout_ms) / 1000, listener) if kind == "handler" and timeout_ms.isdecimal() else None


def _place(error: BaseException) -> str:
    """Return the place where an error was raised, without its text, which may quote a message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""


def _text_of(body: str) -> str:
    """Return the text of a body. Doors that speak JSON send it as a JSON string or as `{"text": …}`."""
    if body[:1] not in ('"', "{"):
        return body
    try:
        found = orjson.loads(body)
    except ValueError:
        return body
    if isinstance(found, dict) and len(found) == 1:
        found = found.get("text")
    return found if isinstance(found, str) else body


def _huh(message: LeasedMessage, why: Faulty | str, step: str, about: str) -> Done:
    reason = why.why if isinstance(why, Faulty) else why
    log.info("huh", listener=message.listener, message_id=message.message_id, step=step)
    body = huh(why, about_tag=about, step=step).decode("utf-8")
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return Done(message, HUH, printable, (Answer(None, HUH_TAG, HUH_NAMESPACE, body),))
