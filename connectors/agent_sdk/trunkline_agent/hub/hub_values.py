"""The values that an agent gets from the hub: messages, results of sending, blobs."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Token
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.held_messages import Held
from trunkline_agent.hub.hub_requests import HANDLED, Handling

REPLY_TYPE: Final = "answer"


class HubValue:
    """The base class of values that have fields of an answer of the hub."""

    __slots__ = ()
    FIELDS: ClassVar[tuple[str, ...]]
    """The fields of the answer, in the order of those of the value."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """Return the value that an answer of the hub has."""
        with ReadAnswer():
            shown = [found[name] for name in cls.FIELDS]
            return cls(*(tuple(one) if isinstance(one, list) else one for one in shown))


@dataclass(frozen=True, slots=True)
class BlobReference(HubValue):
    """A large content that is stored beside the log.

    Attributes:
        digest: Its SHA-256, 64 hex digits.
        bytes: Its length.
        content_type: Its media type.
    """

    FIELDS: ClassVar = ("digest", "bytes", "content_type")
    digest: str
    bytes: int
    content_type: str


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that the hub has stored.

    Attributes:
        message_id: Its id. None: an earlier handling of the same message has sent another content at this
            place, and this one was not sent.
        is_delivered: Whether it is in the mailbox now. A delayed one is not.
        verdict: `accepted`, or `duplicate` if the same request was made before.
    """

    message_id: str | None
    is_delivered: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class Published:
    """A message to a topic that the hub has stored.

    Attributes:
        message_id: Its id. None: as in `Sent`.
        recipients: The number of subscribers that get a copy.
        verdict: As in `Sent`.
    """

    message_id: str | None
    recipients: int
    verdict: str


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
        subject: A short text about the message. None: none.
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
        self.subject: str | None = get("subject")
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
        """True if another consumer has the message's lease now, or the handling took longer than `longest_s`.

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


class ReadAnswer:
    """A block that reads an answer: a missing field raises TrunklineError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyError | TypeError | ValueError | AttributeError):
            raise not_a_gateway()


def not_a_gateway() -> TrunklineError:
    """Return the error, for the caller to raise, of an answer whose fields are not those of a gateway."""
    return TrunklineError(
        "the answer is not that of a Trunkline gateway",
        reason="not_a_gateway",
        advice="check the address of the hub in the credentials",
    )
