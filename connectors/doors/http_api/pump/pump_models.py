"""The request and answer bodies of pumps, listeners and threads (XP-01, XP-07, XP-08)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field, create_model

from connectors.hub.serving.models import (
    WHOLE,
    AnswerBody,
    ListLimit,
    NamedThing,
    PageAnswer,
    PageFilter,
    QueryFilter,
    RequestBody,
    row_answer,
)
from schemas.streams.control.organism import LISTENERS_MOST, ListenerRow, RootTag
from schemas.streams.mailboxes.mailbox_bodies import ANSWERS_MOST
from schemas.streams.thread.threads import ThreadRow
from schemas.wire.wire_body import Note

WAIT_MS_MOST = 10_000
DONE_MOST = 100
# The id of a lease is the name of its pump, a dot and 32 digits.
PumpName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,89}$")]
FREE_MOST = 1000


_Places = Annotated[int, Field(ge=0, le=FREE_MOST), WHOLE]


class PumpStart(RequestBody):
    """The start of a pump. The leases of an earlier process with the same pump name are ended."""

    pump: PumpName
    """Name of the pump."""


class PumpStarted(AnswerBody):
    """The answer to the start of a pump."""

    released: int
    """How many leases of an earlier process of the pump were ended."""
    version: int
    """Version of the organism."""


class LeaseRequest(RequestBody):
    """The messages that a pump can handle now."""

    pump: PumpName
    """Name of the pump."""
    wants: Annotated[dict[NamedThing, _Places], Field(max_length=LISTENERS_MOST)]
    """How many messages for each listener, by the listener's name."""
    free: _Places
    """How many messages in all."""
    alone: bool = False
    """True: lease one message that was leased before, because the pump handles nothing else now."""
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MOST), WHOLE] = 0
    """How long to wait for the first message, in milliseconds."""
    version: Annotated[int, WHOLE] = -1
    """Version of the organism that the pump knows."""


class PumpMessage(AnswerBody):
    """A message that was leased to a pump."""

    listener: str
    """Listener that handles the message."""
    message_id: str
    """Id of the message."""
    request_id: str
    """Id of the lease."""
    attempts: int
    """How often the message was handed out."""
    sender: str
    """Name of the sender."""
    from_verified: bool
    """True if the door authenticated the sender."""
    priority: str
    """`low`, `normal` or `high`."""
    in_reply_to: str | None
    """Id of the message that this one answers. Null: none."""
    kind: str
    """Root tag of the message."""
    content_type: str
    """Media type of the body."""
    body: str
    """Payload as XML."""
    thread: str
    """Id by which the listener knows the conversation."""
    is_reply: bool
    """True if the message answers a call of the listener."""
    timeout_ms: int
    """How long the listener may handle the message, in milliseconds."""
    listener_gone: bool = False
    """True: the listener was removed, and the pump must refuse the message."""


class LeaseAnswer(AnswerBody):
    """The leased messages."""

    version: int
    """Version of the organism."""
    suspects: int
    """How many of the waiting messages were leased before."""
    messages: list[PumpMessage]
    """Messages. Empty if none could be leased in time."""


class GivenAnswer(RequestBody):
    """One payload of a handler's answer."""

    to: NamedThing | None = None
    """Recipient. Null: the listeners of the root tag or, without any, the principal that opened the thread."""
    kind: RootTag
    """Root tag of the payload."""
    namespace: Annotated[str, Field(max_length=200)] | None = None
    """XML namespace that the listeners must have. Null: any."""
    body: str
    """Payload as XML."""


class Done(RequestBody):
    """The outcome of a leased message, and the answers of its handler."""

    listener: NamedThing
    """Listener that had the message."""
    message_id: NamedThing
    """Id of the message."""
    request_id: NamedThing
    """Id of the lease."""
    outcome: Literal["handled", "huh", "nack"]
    """`handled`: the handler ended. `huh`: refused, the answer says why. `nack`: given back, not an attempt."""
    reason: Note = ""
    """Reason for a `nack`."""
    answers: Annotated[list[GivenAnswer], Field(max_length=ANSWERS_MOST)] = Field([])
    """Answers of the handler."""


class SettleRequest(RequestBody):
    """The outcomes of leased messages."""

    pump: PumpName
    """Name of the pump."""
    done: Annotated[list[Done], Field(max_length=DONE_MOST)]
    """Outcomes."""


class SettleResult(AnswerBody):
    """The verdict on the outcome of one message."""

    message_id: str
    """Id of the message."""
    verdict: str
    """`accepted`, `duplicate`, or `rejected` if the lease is no longer valid."""
    reason: str | None
    """Stable code of the rejection. Null: not rejected."""


class SettleAnswer(AnswerBody):
    """The verdicts on the outcomes of a request."""

    results: list[SettleResult]
    """Verdict on each message of the request, in the same order."""


class HistoryRequest(RequestBody):
    """A conversation, named by a listener and the thread by which the listener knows it."""

    listener: NamedThing
    """Name of the listener."""
    thread: NamedThing
    """Id by which the listener knows the conversation."""
    limit: Annotated[ListLimit, WHOLE] = 100
    """Largest number of messages in the answer."""


class HistoryMessage(AnswerBody):
    """A message of a conversation."""

    message_id: str
    """Id of the message."""
    sender: str
    """Name of the sender."""
    to: str
    """Name of the recipient."""
    in_reply_to: str | None
    """Id of the message that this one answers. Null: none."""
    kind: str
    """Root tag of the message."""
    body: str
    """Payload as XML."""
    is_own: bool
    """True if the listener of the request sent the message."""
    posted_at: AwareDatetime
    """Time at which the log stored the message."""


class HistoryAnswer(AnswerBody):
    """The newest messages of a conversation."""

    messages: list[HistoryMessage]
    """Messages, oldest first. Empty for an unknown thread."""
    left: int
    """Number of older messages that were asked for and do not fit into the answer."""


class ListenerFilter(PageFilter):
    """The listeners to list."""

    status: Literal["active", "removed"] = "active"
    """State of the listeners."""


ListenerAnswer: Final = create_model(
    "ListenerAnswer",
    __base__=row_answer("ListenerAnswer", ListenerRow),
    __doc__="A listener.",
    waiting=(int, Field(description="Number of messages that wait for the listener.")),
)


class ListenersAnswer(PageAnswer):
    """The listeners of the organism."""

    version: int
    """Version of the organism, which rises with each change."""
    fault: str | None = None
    """Why this gateway has not loaded the organism file. Null: it has."""
    listeners: list[ListenerAnswer]  # type: ignore[valid-type]
    """Listeners, sorted by name."""


class ThreadFilter(QueryFilter):
    """The threads to list, newest first."""

    root: NamedThing | None = None
    """Id of a tree's first thread, to list this tree only. Without it: all."""
    limit: ListLimit = 100
    """Largest number of threads in the answer."""


ThreadAnswer: Final = create_model(
    "ThreadAnswer",
    __base__=row_answer("ThreadAnswer", ThreadRow),
    __doc__="A conversation that a listener or a client began.",
    parent_thread=(
        str | None,
        Field(description="Id of the thread above. Null: the thread is a tree's first."),
    ),
)


class ThreadsAnswer(AnswerBody):
    """Threads."""

    threads: list[ThreadAnswer]  # type: ignore[valid-type]
    """Threads, newest first."""
