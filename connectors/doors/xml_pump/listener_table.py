"""The listeners that a pump can run, each with its handler and its pipelines (XP-01, XP-09, XP-12).

A change of the organism makes a new table and leaves the old one as it is: messages in progress keep the table
that they began with.

A language model's client (XP-15) is named in `conf/organism.yaml` as `client: module:attribute`. It is an
object with `complete`, or a class whose instances have it. `TokenRate` limits its tokens per minute (XP-08).
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, Protocol, runtime_checkable

import structlog

from connectors.doors.xml_pump.handlers import (
    Handler,
    HandlerError,
    attribute_in,
    handler_in,
    imported,
    split_name,
)
from connectors.doors.xml_pump.pipeline import Pipeline
from connectors.plumbing.xml_payloads.deliveries import ListenerInfo
from connectors.plumbing.xml_payloads.payload_types import PayloadType, cached_schema
from connectors.plumbing.xml_wire.documents import XmlLimits


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation as a language model sees it.

    Attributes:
        role: `user` for the requester, `assistant` for the model itself, `system` for a remark of the pump.
            `tool` is the answer of a listener that the model called.
        name: The sender; for a message of the model itself, the recipient.
        content: The payload as XML; for a remark, plain text.
        call: The message id of the call that the message is, or that it answers; None for other messages.
    """

    role: Literal["user", "assistant", "tool", "system"]
    name: str
    content: str
    call: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model's wish to send a message to the listener `name`, with arguments by its `input_schema`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer of a language model: calls of listeners, a text for the requester, or both.

    Neither of them means that the model waits for answers to its earlier calls. `tokens` is the number of
    tokens that the answer took, for the limit per minute.
    """

    text: str = ""
    calls: Sequence[ToolCall] = field(default_factory=tuple)
    tokens: int = 0


@runtime_checkable
class LlmClient(Protocol):
    """The interface that a client of a language model must have.

    Several calls of `complete` run at once in one event loop, which they must not block.
    """

    async def complete(
        self,
        model: str,
        system_prompt: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Completion:
        """Ask the model for its next answer in a conversation, and return it.

        The pump awaits it for each message to the model's listener, and cancels it after the listener's time
        limit. Any exception is reported to the requester as a `<huh>`, an error message without the exception's
        text.

        Args:
            model: The name of the model, from the organism's file.
            system_prompt: The system prompt, from the organism's file.
            messages: The conversation so far, oldest first.
            tools: The listeners that the model may call: name, description, input_schema.
        """


def client_of(found: object, name: str) -> LlmClient:
    """Return the client of a language model: `found` itself, or an instance of it if it is a class.

    `found` is the attribute that the organism's file names as client, and `name` its `module:attribute` for
    error texts. Raises HandlerError if the class needs arguments or its constructor fails, or if there is no
    `complete` method that is `async def`.
    """
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            raise HandlerError(f"{name}: cannot be made without arguments ({type(error).__name__})") from error
    if not inspect.iscoroutinefunction(getattr(found, "complete", None)):
        raise HandlerError(
            f"{name} is not a client: give it async def complete(model, system_prompt, messages, tools)"
        )
    assert isinstance(found, LlmClient)  # noqa: S101  checked by the lines before
    return found


_MINUTE_S = 60.0


class TokenRate:
    """A limit of the tokens that one listener may use in a minute, in this pump process. Not thread-safe.

    `per_minute` is this process's share of the listener's limit. Before the first answer the cost of a message
    is unknown, so one message at a time may begin.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._spent: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._last_cost: float | None = None

    def spend(self, tokens: int) -> None:
        """Count the tokens of an answer at the current time. A negative number counts as 0."""
        tokens = max(0, tokens)
        self._spent.append((self._clock(), tokens))
        self._sum += tokens
        # The expected cost of the next answer: the mean of the previous expectation and this cost.
        self._last_cost = tokens if self._last_cost is None else (self._last_cost + tokens) / 2

    def places(self, under_way: int, most: int) -> int:
        """Return how many more messages may begin now so that their expected cost keeps to the limit.

        The expected cost of a message follows from the previous answers. Returns 0 when the tokens of the last
        minute have used up the limit, and at least 1 while tokens are left.

        Args:
            under_way: The number of messages in progress.
            most: The largest result.
        """
        begin = self._clock() - _MINUTE_S
        while self._spent and self._spent[0][0] <= begin:
            self._sum -= self._spent.popleft()[1]
        left = self.per_minute - self._sum
        if left <= 0:
            return 0
        if self._last_cost is None:
            return max(0, min(most, 1 - under_way))
        # Let one message through while any tokens are left. Otherwise one that costs more than the limit would
        # never run.
        fitting = max(1, int(left / max(1.0, self._last_cost)))
        return max(0, min(most, fitting - under_way))


log = structlog.stdlib.get_logger(__name__)

HANDLER, LLM, META, HUMAN = "handler", "llm", "meta", "human"
RAW_ARGUMENT: Final = "xml"


@dataclass(frozen=True, slots=True)
class RunnableListener:
    """A listener of the organism, with the loaded code that is needed to handle its messages.

    Attributes:
        info: The description of the listener by the gateway.
        handler: Its function; None for a listener of another type.
        client: The client of its language model; None for a listener of another type.
        pipelines: The checks of the messages that it takes, by root tag.
        reply_pipelines: The checks of the answers to its own messages that it understands, by root tag.
    """

    info: ListenerInfo
    handler: Handler | None = None
    client: LlmClient | None = None
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    reply_pipelines: Mapping[str, Pipeline] = field(default_factory=dict)

    @property
    def kind(self) -> PayloadType | None:
        """The payload type that the listener's handler takes; None for a listener without a handler."""
        return None if self.handler is None else self.handler.payload


@dataclass(frozen=True, slots=True)
class ListenerTable:
    """The listeners of one version of the organism, by name, and those of them that this process can run."""

    version: int = -1
    listeners: Mapping[str, ListenerInfo] = field(default_factory=dict)
    runnable: Mapping[str, RunnableListener] = field(default_factory=dict)

    def tools_of(self, info: ListenerInfo) -> tuple[Mapping[str, Any], ...]:
        """Return the listeners that the listener `info` sees, as tools for a language model (XP-09).

        Each tool has `name`, `description` and `input_schema`. They are sorted by name; empty when it sees
        none.
        """
        seen = sorted(name for name in self.listeners if info.sees(name))
        return tuple(self._tool(self.listeners[name]) for name in seen)

    def kind_of(self, name: str) -> PayloadType | None:
        """Return the payload type that the listener `name` takes.

        None means that the listener has no handler, cannot run here or is unknown.
        """
        found = self.runnable.get(name)
        return None if found is None else found.kind

    def _tool(self, info: ListenerInfo) -> Mapping[str, Any]:
        """Return a listener's description as a tool.

        The text is the description in the organism's file, else the docstring of the class, else the
        capability, which may be only a label.
        """
        kind, given = self.kind_of(info.name), str(info.options.get("description") or "")
        if kind is not None:
            derived = kind.tool_description
            about = given or derived["description"] or info.capability
            return {"name": info.name, "description": about, "input_schema": derived["input_schema"]}
        how = f'the whole payload as XML: <{info.root_tag} xmlns="{info.namespace}">…</{info.root_tag}>'
        schema = {
            "type": "object",
            "properties": {RAW_ARGUMENT: {"type": "string", "description": how}},
            "required": [RAW_ARGUMENT],
        }
        return {"name": info.name, "description": given or info.capability, "input_schema": schema}


class TableMaker:
    """A factory of listener tables, which imports the handlers and remembers the imported modules.

    A module is imported again when its file has changed since. The modules that it imports are not.

    Args:
        schemas_folder: The folder in which the XML schemas of listeners are cached.
        limits: The limits for the XML of messages.
    """

    def __init__(self, schemas_folder: Path, limits: XmlLimits) -> None:
        self._schemas_folder = schemas_folder
        self._limits = limits
        self._modules: dict[str, tuple[str, ModuleType]] = {}
        # The pipeline for messages that no listener's class describes (XP-10).
        self.system_pipeline = Pipeline(None, limits=limits)

    def make(self, version: int, infos: Sequence[ListenerInfo]) -> ListenerTable:
        """Import the handlers of the listeners `infos`, and return a new table of the listeners.

        Blocks while it runs users' code, so call it on a thread. A listener that cannot be loaded raises
        nothing: it is logged, and is missing in the table's `runnable`. Human listeners, which have no code,
        are missing there too. `version` is the organism's version that `infos` describe.
        """
        looked_at: dict[str, ModuleType] = {}
        runnable: dict[str, RunnableListener] = {}
        for info in infos:
            if info.type == HUMAN:
                continue
            try:
                runnable[info.name] = self._runnable(info, looked_at)
            except (HandlerError, OSError, ValueError) as error:
                log.error("listener_not_loaded", listener=info.name, why=str(error))
        return ListenerTable(version, {info.name: info for info in infos}, runnable)

    def _runnable(self, info: ListenerInfo, looked_at: dict[str, ModuleType]) -> RunnableListener:
        if info.type == META:
            return RunnableListener(info)
        if info.type == LLM:
            named = str(info.options.get("client") or "")
            module, attribute = split_name(named)
            client = client_of(attribute_in(self._module(module, looked_at), attribute), named)
            return RunnableListener(info, client=client)
        module, attribute = split_name(info.handler or "")
        handler = handler_in(self._module(module, looked_at), attribute)
        kind = handler.payload
        if (kind.root_tag, kind.namespace) != (info.root_tag, info.namespace):
            raise HandlerError(f"it is to take <{info.root_tag}>, and its handler takes <{kind.root_tag}>")
        if info.xsd is not None and info.xsd != kind.xsd:
            log.warning("schema_differs", listener=info.name, why="the class has changed since it was recorded")
        schema = cached_schema(self._schemas_folder, info.name, kind)
        return RunnableListener(
            info,
            handler,
            pipelines={kind.root_tag: Pipeline(kind, schema, self._limits)},
            reply_pipelines={one.root_tag: Pipeline(one, limits=self._limits) for one in handler.replies},
        )

    def _module(self, name: str, looked_at: dict[str, ModuleType]) -> ModuleType:
        """Return the module. Each table checks it for changes once."""
        if name in looked_at:
            return looked_at[name]
        known = self._modules.get(name)
        if known is None or known[0] != _source_digest(known[1]):
            module = imported(name, anew=known is not None)
            known = self._modules[name] = (_source_digest(module), module)
        looked_at[name] = known[1]
        return known[1]


def _source_digest(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    try:
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return "gone"
