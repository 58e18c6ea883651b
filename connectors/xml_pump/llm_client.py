"""The client of a language model that a listener needs (XP-15), and the limit of its tokens a minute (XP-08).

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

from connectors.xml_pump.handlers import HandlerError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message as a model sees it.

    `role` is `user` for the requester, `assistant` for the model itself, `tool` for the answer of a listener
    that it called, and `system` for a remark of the pump. `name` is the sender, or the recipient of a call.
    `content` is XML, except for remarks. `call` is the message id of the call that the message is or answers.
    """

    role: Literal["user", "assistant", "tool", "system"]
    name: str
    content: str
    call: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a listener that the model sees: its name, and arguments by its `input_schema`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """The model's answer: calls, a text for the requester, or both.

    Neither means that the model waits for answers. `tokens` is its cost, for the limit a minute.
    """

    text: str = ""
    calls: Sequence[ToolCall] = field(default_factory=tuple)
    tokens: int = 0


@runtime_checkable
class LlmClient(Protocol):
    """A client of a language model. Several calls run at once, and it must not block the event loop."""

    async def complete(
        self,
        model: str,
        system_prompt: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> Completion:
        """Return the model's next answer. Any exception becomes a `<huh>` to the requester."""


def client_of(found: object, name: str) -> LlmClient:
    """Return the client that an attribute is, or makes. Raises HandlerError."""
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
    """The tokens of the last minute against a limit: the number of further messages that may begin.

    Each pump process counts for itself and keeps to its share of the limit. Before the first answer the cost of
    a message is unknown, so one message at a time may begin.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._spent: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._last_cost: float | None = None

    def spend(self, tokens: int) -> None:
        """Add the cost of an answer."""
        tokens = max(0, tokens)
        self._spent.append((self._clock(), tokens))
        self._sum += tokens
        # The expected cost of the next answer: the mean of the previous expectation and this cost.
        self._last_cost = tokens if self._last_cost is None else (self._last_cost + tokens) / 2

    def places(self, under_way: int, most: int) -> int:
        """Return how many more messages may begin, at most `most`, while `under_way` are in progress."""
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
