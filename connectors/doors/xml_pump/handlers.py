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

from connectors.plumbing.xml_payloads.payload_types import PayloadType, payload_type_of
from trunkline_agent.errors import UsageError

HISTORY_LIMIT = 100


@dataclass(frozen=True, slots=True)
class ConversationMessage:
    """A message of a conversation, as one of its listeners sees it.

    Attributes:
        message_id: The id of the message.
        sender: The name of its sender.
        to: The recipient, if the listener itself sent the message; else None.
        kind: The root tag of its payload.
        body: The payload as XML text.
        is_own: Whether the listener itself sent the message.
        in_reply_to: The id of the message that this one answers, or None.
    """

    message_id: str
    sender: str
    to: str | None
    kind: str
    body: str
    is_own: bool
    in_reply_to: str | None


class HistoryReader(Protocol):
    """The type of objects that return the earlier messages of a conversation, such as `GatewayLink`."""

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[ConversationMessage]:
        """Return the newest `limit` messages of a listener's conversation `thread`, oldest first.

        `thread` is the listener's own id of the conversation. The result is empty when there are no such
        messages.
        """


@dataclass(frozen=True, slots=True)
class HandlerContext:
    """The second argument of a handler: the conversation and the other listeners (XP-06, XP-09).

    Attributes:
        listener: The name of the handler's listener.
        thread: The listener's own id of the conversation.
        tools: The listeners that it sees, described as tools of a language model: name, description,
            input_schema.
        reader: The source of earlier messages. Handlers call `history` instead.
    """

    listener: str
    thread: str
    tools: tuple[Mapping[str, Any], ...]
    reader: HistoryReader

    async def history(self, limit: int = HISTORY_LIMIT) -> Sequence[ConversationMessage]:
        """Return the newest `limit` messages of this conversation that the listener knows, oldest first.

        The messages come from the gateway. While it does not answer, the call waits, until the handler's time
        limit cancels it.
        """
        return await self.reader.history(self.listener, self.thread, limit)


_Function = TypeVar("_Function", bound=Callable[..., Any])

_ATTRIBUTE: Final = "__trunkline_handler__"
_WHY_LIMIT: Final = 300


class HandlerError(UsageError):
    """A handler, or the client of a language model, cannot be loaded. The text says what to do."""


@dataclass(frozen=True, slots=True)
class ListenerMessage:
    """A message as its handler gets it, the first argument of the handler.

    Attributes:
        payload: An instance of the listener's payload class, or of one of its `replies`; None for any other
            reply.
        xml: The payload as XML.
        root_tag: The name of the payload's root element.
        sender: The name of the sender. The gateway sets it; the sender cannot choose it.
        sender_verified: Whether the gateway knows that the sender is the one that it claims to be.
        thread: The listener's own id of the conversation.
        is_reply: Whether it answers a message of this listener.
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
    """A handler's function, the payload types that it takes and understands as replies.

    `wants_context` means that the function has a second parameter, for a `HandlerContext`.
    """

    function: Callable[..., Awaitable[bytes | None]]
    payload: PayloadType
    replies: tuple[PayloadType, ...]
    wants_context: bool


def handles(payload_class: type, *, replies: Sequence[type] = ()) -> Callable[[_Function], _Function]:
    """Return a decorator that marks a function as a handler, so that the organism's file can name it.

    The function is `async def f(message)` or `async def f(message, context)` and is returned unchanged. The
    decorator raises TypeError for any other function.

    Args:
        payload_class: The class of the payload that the function takes, decorated with `payload`.
        replies: The classes of payloads that it understands as answers to its own messages.
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
    """Import the handler with the name `module:attribute`. Runs the module's code at its first import.

    Raises HandlerError if the name has another form, if the module cannot be imported, or if the attribute is
    missing or is not decorated with `handles`.
    """
    module, attribute = split_name(name)
    return handler_in(imported(module), attribute)


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a handler or client, `module:attribute`, into module and attribute. Imports nothing.

    Raises HandlerError for a text of another form.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise HandlerError(f"{name!r}: write module:attribute, such as my_handlers.calculator:add")
    return module, attribute


def imported(module: str, *, anew: bool = False) -> ModuleType:
    """Return the module with the name `module`, and import it if that has not happened yet.

    Args:
        module: The module's full name.
        anew: Whether to import the current source again, as a new module object. Running handlers keep the old
            module. If the import fails, the old one stays in use.

    Raises:
        HandlerError: The module does not exist, or its code raised an error.
    """
    try:
        return _import_anew(module) if anew else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"[:_WHY_LIMIT]
        raise HandlerError(f"cannot import {module} ({why}); is its folder in PYTHONPATH?") from error


def handler_in(module: ModuleType, attribute: str) -> Handler:
    """Return the handler with the name `attribute` in an imported module.

    Raises HandlerError if the module has no such attribute, or if its value is no function decorated with
    `handles`.
    """
    found = attribute_in(module, attribute)
    handler = getattr(found, _ATTRIBUTE, None)
    if not isinstance(handler, Handler):
        raise HandlerError(
            f"{module.__name__}:{attribute} is not a handler: decorate it with @handles(PayloadClass)"
        )
    return handler


def attribute_in(module: ModuleType, attribute: str) -> Any:
    """Return the value of an imported module's attribute, such as a handler or a language model's client.

    Raises HandlerError if the module has no such attribute.
    """
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise HandlerError(f"{module.__name__} has no {attribute}: name what it defines") from None


class _FromSource(SourceFileLoader):
    """A loader that ignores the cached compilation.

    The cache compares times in whole seconds, and a file may change twice in one second.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Compile the current source file and return its code. Python's import system calls this."""
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
