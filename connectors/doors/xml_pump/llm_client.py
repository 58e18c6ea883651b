"""The interface to the client of a language model (XP-15), and the limit of its tokens per minute (XP-08).

A client is named in `conf/organism.yaml` as `client: module:attribute`. It is an object with `complete`, or a
class whose instances have it.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from connectors.doors.xml_pump.handlers import HandlerError


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
