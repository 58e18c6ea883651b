"""The request and answer bodies of pumps, listeners and threads (XP-01, XP-07, XP-08)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from connectors.gateway.web.models import WHOLE, AnswerBody, ListLimit, NamedThing, QueryFilter, RequestBody
from schemas.streams.control.organism import LISTENERS_MOST, RootTag
from schemas.streams.mailboxes.mailbox_bodies import ANSWERS_MOST
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


class PumpStarted(AnswerBody):
    """The answer to the start of a pump.

    `released`: how many leases of an earlier process of the pump were ended. `version`: the version of the
    organism.
    """

    released: int
    version: int


class LeaseRequest(RequestBody):
    """The messages that a pump can handle now.

    `wants`: how many for each listener, by the listener's name. `free`: how many in all. `alone`: whether to
    lease one message that was leased before, because the pump handles nothing else now. `wait_ms`: how long to
    wait for a message. `version`: the version of the organism that the pump knows.
    """

    pump: PumpName
    wants: Annotated[dict[NamedThing, _Places], Field(max_length=LISTENERS_MOST)]
    free: _Places
    alone: bool = False
    wait_ms: Annotated[int, Field(ge=0, le=WAIT_MS_MOST), WHOLE] = 0
    version: Annotated[int, WHOLE] = -1


class LeaseAnswer(AnswerBody):
    """The leased messages. The list is empty if none could be leased in time.

    `suspects`: how many of the waiting messages were leased before. `version`: the version of the organism.
    """

    version: int
    suspects: int
    messages: list[dict[str, Any]]


class GivenAnswer(RequestBody):
    """One payload of a handler's answer.

    `to`: the recipient. If null, the listeners of the root tag get the payload or, without any, the principal
    that opened the thread. `kind`: the root tag. `namespace`: the XML namespace that the listeners must have,
    null for any. `body`: the payload as XML.
    """

    to: NamedThing | None = None
    kind: RootTag
    namespace: Annotated[str, Field(max_length=200)] | None = None
    body: str


class Done(RequestBody):
    """The outcome of a leased message, and the answers of its handler.

    `handled`: the handler has ended. `huh`: the message was not handled, and the one answer says why. `nack`:
    the message is released, because the pump ends or cannot run the handler; that does not count as an attempt.
    """

    listener: NamedThing
    message_id: NamedThing
    request_id: NamedThing
    outcome: Literal["handled", "huh", "nack"]
    reason: Note = ""
    answers: Annotated[list[GivenAnswer], Field(max_length=ANSWERS_MOST)] = Field([])


class SettleRequest(RequestBody):
    """The outcomes of leased messages."""

    pump: PumpName
    done: Annotated[list[Done], Field(max_length=DONE_MOST)]


class SettleAnswer(AnswerBody):
    """For each message of the request, in the same order, `message_id`, `verdict` and `reason`."""

    results: list[dict[str, Any]]


class HistoryRequest(RequestBody):
    """A conversation, named by a listener and the thread by which the listener knows it."""

    listener: NamedThing
    thread: NamedThing
    limit: Annotated[ListLimit, WHOLE] = 100


class HistoryAnswer(AnswerBody):
    """The messages of a conversation, oldest first."""

    messages: list[dict[str, Any]]


class ListenerFilter(QueryFilter):
    """The listeners to list."""

    status: Literal["active", "removed"] = "active"


class ListenersAnswer(AnswerBody):
    """The listeners, sorted by name.

    `version` rises with each change of the organism. `fault`: why this gateway has not loaded the organism
    file; null without a fault.
    """

    version: int
    fault: str | None = None
    listeners: list[dict[str, Any]]


class ThreadFilter(QueryFilter):
    """The threads to list, newest first. `root`: only the threads of the tree with this first thread."""

    root: NamedThing | None = None
    limit: ListLimit = 100


class ThreadsAnswer(AnswerBody):
    """Threads, each with the principal that opened it and the principal on whose behalf it was opened."""

    threads: list[dict[str, Any]]
