"""Plans: generators that yield a `Request` or a `Pause`, and are sent an `Answer` or a `Lost` connection.

A plan does no input or output and has no await, so the same plan serves the sync and the async client. Here are
the plan `exchange`, which repeats a request, and its back-off; `trunkline_agent.hub.hub_requests` builds on it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urlencode

from trunkline_agent.errors import BackboneUnreachable, RateLimited, TrunklineError
from trunkline_agent.hub.answer_errors import error_of, retry_after_of

_FIRST_S: Final = 0.2
_MOST_S: Final = 3.0
_DOUBLINGS_MOST: Final = 30
_T = TypeVar("_T")
# Answers that another attempt may change. The gateway answers 408 to a request that came too slowly.
_AGAIN: Final = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)


def backoff_s(
    failures: int,
    first_s: float = _FIRST_S,
    most_s: float = _MOST_S,
    chance: Callable[[], float] = random.random,
) -> float:
    """Return how long to wait before another attempt: half to all of a time, so that callers spread.

    Args:
        failures: How many attempts have failed before the last one. The time doubles with each.
        first_s: The time after the first failure, in seconds.
        most_s: The longest time.
        chance: Returns a random number of at least 0 and less than 1.
    """
    return min(first_s * 2.0 ** min(failures, _DOUBLINGS_MOST), most_s) * (0.5 + chance() / 2)


@dataclass(slots=True)
class Request:
    """A request to the hub.

    Attributes:
        method: The HTTP method.
        path: The path, quoted, beginning with a slash.
        query: The query parameters. None values are left out.
        headers: Headers beside `Host`, `Authorization`, `Accept` and `Content-Length`.
        body: The body.
        wait_s: The seconds that the answer may take in addition to the client's time-out.
        is_repeatable: Whether the request may be sent again if it is unknown whether it arrived: the server
            recognizes it by a key, or it changes nothing.
    """

    method: str
    path: str
    query: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    wait_s: float = 0.0
    is_repeatable: bool = True

    @property
    def target(self) -> str:
        """The path with the query."""
        if not self.query:
            return self.path
        wanted = {name: value for name, value in self.query.items() if value is not None}
        return f"{self.path}?{urlencode(wanted)}" if wanted else self.path


@dataclass(slots=True)
class Answer:
    """An answer of the hub.

    Attributes:
        status: The HTTP status.
        headers: The headers by their names in lower case. Of a repeated header it is the last one.
        body: The whole body.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """True if the status is between 200 and 299."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Return the JSON of the body as Python values. Raises TrunklineError if it is not JSON."""
        try:
            return json.loads(self.body.decode("utf-8"))
        except (ValueError, RecursionError):
            raise TrunklineError(
                f"the answer (status {self.status}) is not that of a Trunkline gateway",
                reason="not_a_gateway",
                advice="check the address of the hub in the credentials",
            ) from None


@dataclass(slots=True)
class Lost:
    """A request without an answer: no connection, or it was lost, or the time-out passed.

    Attributes:
        why: The cause, for people, with the address.
        was_sent: Whether the server may have got the request.
        cause: The text of the network error alone.
    """

    why: str
    was_sent: bool = True
    cause: str = ""


@dataclass(slots=True)
class Pause:
    """A pause of a plan, after which the plan is sent None."""

    seconds: float


Plan: TypeAlias = Generator[Request | Pause, Any, _T]
"""A plan whose result is a `_T`. A `Request` is answered with an `Answer` or a `Lost`, a `Pause` with None."""


@dataclass(frozen=True, slots=True)
class Retries:
    """When a request without a final answer is sent again.

    Attributes:
        patience_s: No new attempt begins when so many seconds have passed since the first attempt failed.
        clock: Returns a monotonic time in seconds.
        chance: Returns a random number of at least 0 and less than 1.
    """

    patience_s: float = 30.0
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random


def exchange(
    request: Request,
    retries: Retries,
    is_final: Callable[[Answer], bool] | None = None,
) -> Plan[Answer]:
    """Send a request until there is a final answer, and return it.

    It is sent again when the connection is lost, and after 408, 429, 502, 503 and 504. The pauses grow to 3 s;
    `Retry-After` makes one longer.

    Args:
        request: The request. One that is not repeatable is sent again only if it cannot have arrived, or the
            gateway refused it with 429 or 503.
        retries: The patience.
        is_final: Returns whether to return an answer. None: those with status 2xx. Any other answer raises the
            error of its status.

    Raises:
        RateLimited: 429, and the patience has ended.
        BackboneUnreachable: The last attempt had no answer, or 408, 502, 503 or 504.
        TrunklineError: As `error_of` maps the status of another answer.
    """
    outcome = yield request
    if _is_wanted(outcome, is_final):
        return outcome  # type: ignore[no-any-return]
    give_up_at = retries.clock() + retries.patience_s
    failures = 0
    while True:
        problem, is_to_retry = _judged(outcome, request)
        pause_s = max(backoff_s(failures, chance=retries.chance), retry_after_of(outcome))
        if not is_to_retry or retries.clock() + pause_s >= give_up_at:
            raise problem
        yield Pause(pause_s)
        failures += 1
        outcome = yield request
        if _is_wanted(outcome, is_final):
            return outcome  # type: ignore[no-any-return]


def _is_wanted(outcome: Answer | Lost, is_final: Callable[[Answer], bool] | None) -> bool:
    if not isinstance(outcome, Answer):
        return False
    return 200 <= outcome.status < 300 if is_final is None else is_final(outcome)


def _judged(outcome: Answer | Lost, request: Request) -> tuple[TrunklineError, bool]:
    """Return the error of an outcome, and whether another attempt may help."""
    if isinstance(outcome, Lost):
        is_to_retry = request.is_repeatable or not outcome.was_sent
        advice = "check that the hub runs and that its address is right"
        if not is_to_retry:
            advice = "the request may have been carried out; look before you repeat it"
        return BackboneUnreachable(outcome.why, advice=advice), is_to_retry
    problem = error_of(outcome.status, outcome.headers, outcome.body)
    is_transient = isinstance(problem, BackboneUnreachable | RateLimited) and outcome.status in _AGAIN
    # A 502 or 504 comes from a proxy that may have passed the request on.
    is_refused = outcome.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return problem, is_transient and (request.is_repeatable or is_refused)
