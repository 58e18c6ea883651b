"""An operation of the hub: two plain functions around records of the log (decision 0055).

`plan` makes the records from a request, and `answer` makes the answer when they are settled. Neither waits.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, get_args

from fastapi import Response
from pydantic import BaseModel

from connectors.gateway.services.hub import Hub
from connectors.gateway.web.admission import WhyRefused, reason_alone
from connectors.gateway.web.idempotency import IdempotencyKey, Origin, request_uuid
from connectors.gateway.web.models import ERRORS
from connectors.gateway.web.policy import Action, Caller
from connectors.gateway.web.refusals import DOOR
from connectors.live.settled_feed import SettledRecord
from schemas.wire.record import OutgoingRecord


class Unusual(Exception):
    """The careful path must serve this request, from its beginning. Nothing has changed yet."""


class Behind(Unusual):
    """The log may have something that this gateway has not settled. Catch up, and plan again."""


class IsGone(Protocol):
    """Tells whether a client that has waited has left meanwhile."""

    async def __call__(self, *, is_probed: bool = False) -> bool:
        """Return whether it has. Raises ApiError (401) if its token is no longer valid."""


class Answer(NamedTuple):
    """The answer to a request: a JSON document, and the verdict on what it changed, None for none."""

    document: Any
    verdict: str | None = None


class Connection(Protocol):
    """The connection of a request."""

    def is_heard(self) -> bool:
        """Return whether the client was there a moment ago."""

    def admits(self, principal: str, *, is_operator: bool) -> bool:
        """Count the connection as one of a principal. Return False if the principal has too many."""

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Send the answer: its status, the lines of its headers, and its body."""

    def pass_on(self, exchange: Exchange) -> None:
        """Let the careful path answer."""


class Asked:
    """A request for an operation, whose values are validated.

    Attributes:
        caller: Its sender.
        body: The body, as the operation's model. None: it has none.
        query: The query, as the operation's model. None: it has none.
        key: The idempotency key.
        is_heard: Returns whether the client was there a moment ago.
        is_fresh: Whether this gateway has settled all that the log had when the request came.
        known: A note of `plan` for `answer`.
    """

    __slots__ = ("_made", "body", "caller", "is_fresh", "is_heard", "key", "known", "query")

    def __init__(
        self,
        caller: Caller,
        body: Any,
        query: Any,
        key: str | None,
        is_heard: Callable[[], bool],
    ) -> None:
        self.caller = caller
        self.body = body
        self.query = query
        self.key = key
        self.is_heard = is_heard
        self.is_fresh = False
        self.known: Any = None
        self._made: uuid.UUID | None = None

    @property
    def made(self) -> uuid.UUID:
        """The UUID of what the request makes. A repeated request with a key has the same one."""
        if self._made is None:
            self._made = request_uuid(self.caller.requester, self.key)
        return self._made

    @property
    def origin(self) -> Origin:
        """The arguments `door` and `principal` of the functions that build records."""
        return {"door": DOOR, "principal": self.caller.principal}


class Exchange:
    """A usual request on its connection.

    Attributes:
        connection: Where it came from.
        operation: The operation that it asks for.
        request: Its bytes.
        headers: Its headers by their names in lower case.
        query: Its query, without the question mark.
        body: Its body.
        caller: Its sender, once it is admitted.
        asked: Its validated values, once there are any.
        began: The time at which it came, by the monotonic clock.
        settled: The settled records, in the order of the plan.
        left: How many are not settled yet.
    """

    __slots__ = (
        "asked",
        "began",
        "body",
        "caller",
        "connection",
        "headers",
        "left",
        "operation",
        "query",
        "request",
        "settled",
    )

    caller: Caller
    asked: Asked

    def __init__(
        self,
        connection: Connection,
        operation: Operation,
        request: bytes,
        headers: dict[bytes, bytes],
        query: bytes,
        body: bytes,
    ) -> None:
        self.connection = connection
        self.operation = operation
        self.request = request
        self.headers = headers
        self.query = query
        self.body = body
        self.began = time.monotonic()
        self.settled: list[Any] = []
        self.left = 0


class Operation(ABC):
    """One operation of the hub: what it is called, who may ask for it, and the two functions.

    The docstring of the class is its description in the documents of the API.

    Attributes:
        NAME: The name, such as `send_message`.
        METHOD: The HTTP method.
        PATH: The path.
        ACTION: The action that the caller needs a right to. It depends on no owner.
        ANSWER: The model of the answer.
        BODY: The model of the body. None: there is none.
        QUERY: The model of the query. None: there is none.
        KEY: The header with the idempotency key, as the type of a route's parameter.
        RESPONSES: Further answers, for the documents of the API.
        IS_BOUNDED: Whether the records count among those that a principal may have under way.
    """

    NAME: ClassVar[str]
    METHOD: ClassVar[str] = "POST"
    PATH: ClassVar[str]
    ACTION: ClassVar[Action]
    ANSWER: ClassVar[type[BaseModel]]
    BODY: ClassVar[type[BaseModel] | None] = None
    QUERY: ClassVar[type[BaseModel] | None] = None
    KEY: ClassVar[Any] = IdempotencyKey
    RESPONSES: ClassVar[dict[int | str, dict[str, Any]]] = ERRORS
    IS_BOUNDED: ClassVar[bool] = False

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.key_header = str(get_args(self.KEY)[1].alias)

    @property
    def route(self) -> str:
        """Method and path, as the records of refusals name them."""
        return f"{self.METHOD} {self.PATH}"

    @property
    def why_refused(self) -> WhyRefused:
        """Words the recorded reason of a malformed request."""
        return reason_alone

    @abstractmethod
    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the records of a request.

        Raises:
            Unusual: The careful path must serve the request.
            ApiError: It is refused.
        """

    @abstractmethod
    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Return the answer, from the settled records in the order of the plan.

        Raises:
            Unusual: The careful path must serve the request anew.
            ApiError: The log has refused a record.
        """

    async def slowly(self, asked: Asked, is_gone: IsGone) -> Response:
        """Return the answer to a request that is unusual for this operation, such as one that waits.

        `is_gone` tells whether the client has left, after a wait; with `is_probed` also one whose link is dead.
        """
        raise NotImplementedError

    def ended(self, asked: Asked) -> None:  # noqa: B027  most operations note nothing
        """Forget what `plan` has noted, because the records are settled, or will not be."""
