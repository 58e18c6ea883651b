"""An operation of the hub: two plain functions around records of the log (decision 0055).

`plan` makes the records from a request, and `answer` makes the answer when they are settled. Neither waits, but
`answer` may return a coroutine that does.
"""

from __future__ import annotations

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol, get_args

from fastapi import Request, Response
from pydantic import BaseModel, TypeAdapter

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.serving.admission import OwnerOf, WhyRefused, reason_alone
from connectors.hub.serving.answers import BUSY, DOOR, json_answer, unavailable
from connectors.hub.serving.identities import IdempotencyKey, Origin, caller_of, request_uuid
from connectors.hub.serving.models import ERRORS
from connectors.hub.serving.policy import Action, Caller
from schemas.wire.record import OutgoingRecord

# Answers below this are not counted: all connections together have few MiB of them.
SMALL_BYTES: Final = 32 * 1024


class Unusual(Exception):
    """The careful path must serve this request, from its beginning. Nothing has changed yet."""


class Behind(Unusual):
    """The log may have something that this gateway has not settled. Catch up, and plan again.

    `plan` raises it only as long as the request is not fresh.
    """


class Waiting(Unusual):
    """There is nothing yet. Plan again when a message is settled, or when the time is over.

    Attributes:
        mailboxes: The mailboxes whose messages end the wait.
        left_s: How many seconds to wait.
        request: The part that all ids of a repeatable request have in common.
        is_probed: Whether the client must answer a probe after the wait, because what it gets is gone then.
    """

    def __init__(
        self, mailboxes: Sequence[Mailbox], left_s: float, request: str | None, *, is_probed: bool
    ) -> None:
        super().__init__()
        self.mailboxes = mailboxes
        self.left_s = left_s
        self.request = request
        self.is_probed = is_probed


class IsGone(Protocol):
    """Tells whether a client that has waited has left meanwhile."""

    async def __call__(self, *, is_probed: bool = False) -> bool:
        """Return whether it has. Raises ApiError (401) if its token is no longer valid."""


class Answer(NamedTuple):
    """The answer to a request: a JSON document, and the verdict on what it changed, None for none."""

    document: Any
    verdict: str | None = None


class Asked:
    """A request for an operation, whose values are validated.

    Attributes:
        caller: Its sender.
        body: The body, as the operation's model. None: it has none.
        query: The query, as the operation's model. None: it has none.
        key: The idempotency key.
        is_heard: Returns whether the client was there a moment ago.
        path: The values of the path's parameters, by their names.
        began: The time at which it began, by the monotonic clock.
        is_fresh: Whether this gateway has settled all that the log had when the request came or was woken.
        is_gone: Whether the client has left during a wait, so that it gets nothing.
        attempts: How many of its records got nothing, because other requests were faster.
        known: A note of `plan` for `answer`.
        settled: The settled records, or errors, in the order of the plan.
        left: How many are not settled yet.
    """

    __slots__ = (
        "_made",
        "attempts",
        "began",
        "body",
        "caller",
        "is_fresh",
        "is_gone",
        "is_heard",
        "key",
        "known",
        "left",
        "path",
        "query",
        "settled",
    )

    def __init__(
        self,
        caller: Caller,
        body: Any,
        query: Any,
        key: str | None,
        is_heard: Callable[[], bool],
        path: Mapping[str, Any],
    ) -> None:
        self.caller = caller
        self.body = body
        self.query = query
        self.key = key
        self.is_heard = is_heard
        self.path = path
        self.began = time.monotonic()
        self.is_fresh = False
        self.is_gone = False
        self.attempts = 0
        self.known: Any = None
        self.settled: list[Any] = []
        self.left = 0
        self._made: uuid.UUID | None = None

    @property
    def requester(self) -> str:
        """The namespace of the request's idempotency key."""
        return self.caller.requester

    @property
    def principal(self) -> str:
        """The name of the principal that sent the request."""
        return self.caller.principal

    @property
    def request_id(self) -> str:
        """The text of `made`, for the field `request_id` of the records that the request appends."""
        return str(self.made)

    @property
    def made(self) -> uuid.UUID:
        """The UUID of what the request makes. A repeated request with a key has the same one."""
        if self._made is None:
            self._made = request_uuid(self.requester, self.key)
        return self._made

    @property
    def origin(self) -> Origin:
        """The arguments `door` and `principal` of the functions that build records."""
        return {"door": DOOR, "principal": self.caller.principal}


def owner_by(hub: Hub, owner: Callable[[Asked], str | None]) -> OwnerOf:
    """Return a function with which the access check finds an owner, by a function as `Operation.owner`.

    The request that `owner` gets is not validated, and has no body. If it raises Behind, it is called again
    when the live view has caught up with the log. BackboneUnreachable is raised if that takes too long.
    """

    async def found(request: Request) -> str | None:
        asked = Asked(caller_of(request), None, None, None, lambda: False, request.path_params)
        try:
            return owner(asked)
        except Behind:
            await hub.fresh.catch_up()
            asked.is_fresh = True
            return owner(asked)

    return found


async def reserve_bytes(hub: Hub, principal: str, size: int) -> None:
    """Wait until there is room for `size` bytes of the present request's answer. Raises ApiError (503)."""
    wait_s = hub.settings.gateway.settle_timeout_s
    if size > SMALL_BYTES and not await hub.answer_memory.reserve(principal, size, wait_s):
        raise unavailable("the gateway has too many long answers under way; try again", BUSY)


class Value(NamedTuple):
    """A class of the libraries of agents for the answer of an operation, or for a row of a list.

    Attributes:
        name: Its name. Empty: that of the answer's model, without `Answer`.
        text: Its text. None: that of the answer's model.
        fields: The fields of the answer that it has. None: all.
        renamed: The names of those fields that have other ones, by the names in the answer.
    """

    name: str = ""
    text: str | None = None
    fields: Sequence[str] | None = None
    renamed: Mapping[str, str] = {}


class Call(NamedTuple):
    """A method by which the libraries of agents offer an operation.

    Attributes:
        name: Its name in Python. In JavaScript it is in camel case.
        value: The class of what it returns. None: it returns nothing.
        text: Its description. None: the first paragraph of the operation's description.
        takes: The fields of body or query that are its arguments. None: all of them.
    """

    name: str
    value: Value | None = Value()
    text: str | None = None
    takes: Sequence[str] | None = None


class Planned(ABC):
    """Two functions around records of the log, whatever the door.

    Attributes:
        IS_BOUNDED: Whether the records count among those that a principal may have under way.
    """

    IS_BOUNDED: ClassVar[bool] = False

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    @abstractmethod
    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the records of a request. There are none if it only reads.

        Raises:
            Unusual: The careful path must serve the request.
            ApiError: It is refused.
        """

    @abstractmethod
    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer | Awaitable[Answer]:
        """Return the answer, from the settled records in the order of the plan. It may come after a wait.

        Raises:
            Behind: Another request was faster. Catch up, and plan again.
            Unusual: The careful path must serve the request anew.
            ApiError: The log has refused a record.
        """

    def ended(self, asked: Asked) -> None:  # noqa: B027  most operations note nothing
        """Forget what `plan` has noted, because the records are settled, or will not be."""

    async def later(self, asked: Asked) -> Answer:
        """Return the answer to a request for which `plan` has raised Unusual, after a wait."""
        raise NotImplementedError


class Operation(Planned):
    """One operation of the hub: what it is called, who may ask for it, and the two functions.

    The docstring of the class is its description in the documents of the API.

    Attributes:
        NAME: The name, such as `send_message`.
        METHOD: The HTTP method.
        PATH: The path. Its parameters are in braces.
        PARAMETERS: The types of the path's parameters, by their names.
        ACTION: The action that the caller needs a right to.
        ANSWER: The model of the answer.
        BODY: The model of the body. None: there is none.
        NEEDS_BODY: Whether a request without a body is malformed.
        QUERY: The model of the query. None: there is none.
        KEY: The header with the idempotency key, as the type of a route's parameter. None: there is none.
        RESPONSES: Further answers, for the documents of the API.
        STATUS: The status of the answer.
        IS_DIRECT: Whether the engine may serve it. Otherwise the careful path serves all its requests.
        EXAMPLE: An example of the body, for the documents of the API. None: it follows from its fields.
        TOOL: The name of the agents' MCP tool that follows from the declaration, such as `count_messages`.
        COMMAND: The action of the command line that follows from it, such as `topics list`.
        CALL: The method of the libraries of agents that follows from it.
    """

    NAME: ClassVar[str]
    METHOD: ClassVar[str] = "POST"
    PATH: ClassVar[str]
    PARAMETERS: ClassVar[dict[str, Any]] = {}
    ACTION: ClassVar[Action]
    ANSWER: ClassVar[type[BaseModel]]
    BODY: ClassVar[type[BaseModel] | None] = None
    NEEDS_BODY: ClassVar[bool] = True
    QUERY: ClassVar[type[BaseModel] | None] = None
    KEY: ClassVar[Any] = IdempotencyKey
    RESPONSES: ClassVar[dict[int | str, dict[str, Any]]] = ERRORS
    STATUS: ClassVar[int] = 200
    IS_DIRECT: ClassVar[bool] = True
    EXAMPLE: ClassVar[dict[str, Any] | None] = None
    TOOL: ClassVar[str | None] = None
    COMMAND: ClassVar[str | None] = None
    CALL: ClassVar[Call | None] = None

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        # No header has an empty name.
        self.key_header = b"" if self.KEY is None else str(get_args(self.KEY)[1].alias).lower().encode()
        # In the order of the path.
        self.parameters = {
            name: TypeAdapter[Any](self.PARAMETERS[name]) for name in re.findall(r"{(\w+)}", self.PATH)
        }

    @property
    def route(self) -> str:
        """Method and path, as the records of refusals name them."""
        return f"{self.METHOD} {self.PATH}"

    @property
    def why_refused(self) -> WhyRefused:
        """Words the recorded reason of a malformed request."""
        return reason_alone

    @property
    def owner_of(self) -> OwnerOf:
        """Finds the owner of the thing that a request is about, before the request is validated."""
        return owner_by(self.hub, self.owner)

    def owner(self, asked: Asked) -> str | None:
        """Return the owner of the thing that a request is about, by what this gateway has settled.

        It is asked for if the right of the caller depends on it, on the careful path before the body is read.
        None: there is no known owner. Raises Behind if the log may have the thing.
        """
        return None

    async def slowly(self, asked: Asked, is_gone: IsGone) -> Response:
        """Return the answer to a request that is unusual for this operation, such as one that waits.

        `is_gone` tells whether the client has left, after a wait; with `is_probed` also one whose link is dead.
        """
        document, verdict = await self.later(asked)
        return json_answer(document, self.STATUS, verdict)
