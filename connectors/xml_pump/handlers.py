"""Handlers: the functions that listeners run for each of their messages (XP-06), and how they are loaded.

    @payload("calculate", namespace="urn:example:calculator:1")
    @dataclass
    class Calculate:
        first: Decimal
        second: Decimal

    @handles(Calculate)
    async def add(message):
        return to_xml(Result(message.payload.first + message.payload.second))

A handler holds no state: any pump process may get the next message. It must not block the event loop, which all
handlers of a process share.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, Final, Protocol, TypeVar

from connectors.xml_payloads.payload_types import PayloadType, payload_type_of
from schemas.errors import UsageError

HISTORY_LIMIT = 100


@dataclass(frozen=True, slots=True)
class ConversationMessage:
    """A message of a conversation.

    `is_own` means that the listener itself sent it, to `to`. `in_reply_to` is the id of the message that it
    answers.
    """

    message_id: str
    sender: str
    to: str | None
    kind: str
    body: str
    is_own: bool
    in_reply_to: str | None


class HistoryReader(Protocol):
    """The source of a conversation's messages."""

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[ConversationMessage]:
        """Return the newest messages of a conversation, oldest first."""


@dataclass(frozen=True, slots=True)
class HandlerContext:
    """The second argument of a handler: what it may ask for besides its message (XP-06, XP-09).

    `listener` is its name. `thread` is the listener's own name of the conversation. `tools` describes the
    listeners that it sees, for a language model: name, description, input_schema.
    """

    listener: str
    thread: str
    tools: tuple[Mapping[str, Any], ...]
    reader: HistoryReader

    async def history(self, limit: int = HISTORY_LIMIT) -> Sequence[ConversationMessage]:
        """Return the messages of this conversation that the listener knows, oldest first."""
        return await self.reader.history(self.listener, self.thread, limit)


_Function = TypeVar("_Function", bound=Callable[..., Any])

_ATTRIBUTE: Final = "__trunkline_handler__"
_WHY_LIMIT: Final = 300


class HandlerError(UsageError):
    """A handler cannot be used. The text says what to do."""


@dataclass(frozen=True, slots=True)
class ListenerMessage:
    """A message as its handler gets it.

    `payload` is an instance of the listener's class, or of one of its `replies`; it is None for any other
    reply. `xml` is the payload as it came. The gateway sets `sender`; the sender cannot choose it. `thread` is
    the listener's opaque name of the conversation. `is_reply` means that it answers a message of this listener.
    """

    payload: Any
    xml: bytes
    root_tag: str
    sender: str
    sender_verified: bool
    thread: str
    is_reply: bool


@dataclass(frozen=True, slots=True)
class Handler:
    """A function with its payload types. `wants_context` means that it has a second parameter."""

    function: Callable[..., Awaitable[bytes | None]]
    payload: PayloadType
    replies: tuple[PayloadType, ...]
    wants_context: bool


def handles(payload_class: type, *, replies: Sequence[type] = ()) -> Callable[[_Function], _Function]:
    """Mark a function as a handler of a payload class.

    The function is `async def f(message)` or `async def f(message, context)`. `replies` are the classes of the
    answers to its own messages that it understands. Raises TypeError for a function that cannot be a handler.
    """
    kind, kinds = payload_type_of(payload_class), tuple(payload_type_of(one) for one in replies)

    def mark(function: _Function) -> _Function:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__qualname__}: a handler is a coroutine function (async def)")
        parameters = list(inspect.signature(function).parameters.values())
        if len(parameters) not in (1, 2) or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
            raise TypeError(f"{function.__qualname__}: a handler takes (message) or (message, context)")
        setattr(function, _ATTRIBUTE, Handler(function, kind, kinds, len(parameters) == 2))
        return function

    return mark


def load_handler(name: str) -> Handler:
    """Return the handler that `module:attribute` names. Raises HandlerError."""
    module, attribute = split_name(name)
    return handler_in(imported(module), attribute)


def split_name(name: str) -> tuple[str, str]:
    """Return module and attribute of `module:attribute`. Raises HandlerError."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise HandlerError(f"{name!r}: write module:attribute, such as my_handlers.calculator:add")
    return module, attribute


def imported(module: str, *, anew: bool = False) -> ModuleType:
    """Return the module, imported if need be. Raises HandlerError for any error of the import.

    `anew` makes a new module object of the current source; running handlers keep the old one. Nothing changes
    when the import fails.
    """
    try:
        return _import_anew(module) if anew else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"[:_WHY_LIMIT]
        raise HandlerError(f"cannot import {module} ({why}); is its folder in PYTHONPATH?") from error


def handler_in(module: ModuleType, attribute: str) -> Handler:
    """Return the handler of this name in a module. Raises HandlerError."""
    found = attribute_in(module, attribute)
    handler = getattr(found, _ATTRIBUTE, None)
    if not isinstance(handler, Handler):
        raise HandlerError(
            f"{module.__name__}:{attribute} is not a handler: decorate it with @handles(PayloadClass)"
        )
    return handler


def attribute_in(module: ModuleType, attribute: str) -> Any:
    """Return a module's attribute. Raises HandlerError."""
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise HandlerError(f"{module.__name__} has no {attribute}: name what it defines") from None


class _FromSource(SourceFileLoader):
    """A loader that ignores the cached compilation.

    The cache compares times in whole seconds, and a file may change twice in one second.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Compile the current source."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_anew(name: str) -> ModuleType:
    importlib.invalidate_caches()
    before = sys.modules.pop(name, None)
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return importlib.import_module(name)
        spec.loader = _FromSource(name, spec.origin)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module
