"""What a handler may ask for beside its message: who it is, whom it sees, what was said (XP-06, XP-09)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HISTORY_LIMIT = 100


@dataclass(frozen=True, slots=True)
class SaidMessage:
    """A message of a conversation. `is_own`: the listener itself said it, to `to`. `in_reply_to`: the id of the
    message that it answers.
    """

    message_id: str
    sender: str
    to: str | None
    kind: str
    body: str
    is_own: bool
    in_reply_to: str | None


class HistoryReader(Protocol):
    """Where the context asks what was said."""

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[SaidMessage]:
        """The newest messages of a conversation, oldest first."""


@dataclass(frozen=True, slots=True)
class HandlerContext:
    """The second argument of a handler. `thread`: the listener's own name of the conversation. `tools`:
    descriptions of the listeners that it sees, for a language model: name, description, input_schema.
    """

    listener: str
    thread: str
    tools: tuple[Mapping[str, Any], ...]
    reader: HistoryReader

    async def history(self, limit: int = HISTORY_LIMIT) -> Sequence[SaidMessage]:
        """What was said in this conversation, as the listener knows it, oldest first."""
        return await self.reader.history(self.listener, self.thread, limit)
