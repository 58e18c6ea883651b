"""A message that an agent received: what it says, and the keys of what is sent while it is handled."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Token
from typing import Any, Final

from trunkline_agent.hub.derived_keys import HANDLED, Handling
from trunkline_agent.hub.held_messages import Held
from trunkline_agent.hub.hub_values import BlobReference, not_a_gateway

REPLY_TYPE: Final = "answer"


class ReceivedMessage:
    """A message that an agent received, as the hub shows it.

    Attributes:
        id: Its id.
        sender: The mailbox of the sender, to which an answer goes.
        recipient: The mailbox that got it.
        type: Its kind, a word that the sender chose.
        payload: Its content: any JSON as Python values.
        timestamp: When the log stored it, in ISO 8601.
        in_reply_to: The id of the message that it answers. None: none.
        thread: The id of the conversation. None: none.
        topic: The topic to which it was published. None: none.
        reference: The blob that it refers to. None: none.
        replay_of: The id of the dead message that it repeats. None: none.
        attempt: How often it was handed out, if it is leased. Above 1, its work may have begun before.
    """

    def __init__(self, found: Mapping[str, Any], held: Held | None = None) -> None:
        try:
            self.id: str = found["id"]
            self.sender: str = found["sender"]
            self.recipient: str = found["recipient"]
            self.type: str = found["type"]
            self.payload: Any = found["payload"]
            self.timestamp: str = found["timestamp"]
            get = found.get
        except (KeyError, TypeError, AttributeError):
            raise not_a_gateway() from None
        self.in_reply_to: str | None = get("in_reply_to")
        self.thread: str | None = get("thread")
        self.topic: str | None = get("topic")
        blob = get("blob")
        self.reference: BlobReference | None = None if blob is None else BlobReference.of(blob)
        self.replay_of: str | None = get("replay_of")
        self.attempt: int | None = get("attempt")
        self.held = held
        self.handling = Handling(self.id, self.attempt)
        self._token: Token[Handling | None] | None = None

    @property
    def lease_lost(self) -> bool:
        """Whether the hub has said that the message's lease is another consumer's now.

        A long handling should look at it and stop: its work may be done a second time.
        """
        return self.held is not None and self.held.is_lost

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.type!r} from {self.sender!r}>"

    def _begin(self) -> None:
        self._token = HANDLED.set(self.handling)

    def _end(self) -> None:
        if self._token is not None:
            token, self._token = self._token, None
            try:
                HANDLED.reset(token)
            except ValueError:
                # The block ends in another context than it began in, which then never sees the value.
                return
