"""A client of several gateways on the library's hub client. It asks again, with one key, until it is answered.

The library decides what is sent again, and when. Here each attempt takes another gateway, and each
one is counted, because the oracle has to know of which request the outcome is unknown.
"""

from __future__ import annotations

import json as json_format
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub import sync_client
from trunkline_agent.hub.plans import Answer, Lost, Pause, Plan, Request, Retries, exchange

_PAUSE_S: Final = 0.15
# Both together are the longest time of an attempt.
_CONNECT_S, _ANSWER_S = 2.0, 6.0
# Not 500, which no gateway may answer. 502 is the answer of a task whose gateway was killed while it launched.
_AGAIN: Final = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
# A gateway answers so while it has not read a stream yet: 404 for its object, 401 for its token.
_NOT_READ: Final = (401, 404)
# A program of the library needs two leases to find that nothing is left, after a gateway that was away.
_AFTER_LOAD_S: Final = 20.0


class GaveUp(Exception):
    """The load's time is over and there is still no answer."""


class Clock:
    """When the load ends: `may_begin` until then, `has_patience` for what was begun; both until `begin`."""

    def __init__(self) -> None:
        self._end = self._deadline = math.inf
        self.stopped = threading.Event()

    def begin(self, load_s: float, patience_s: float) -> None:
        """The load begins now."""
        self._end = time.monotonic() + load_s
        self._deadline = self._end + patience_s

    def go_on(self, seconds: float) -> None:
        """The load lasts at least so long from now."""
        self._end = max(self._end, time.monotonic() + seconds)
        self._deadline = max(self._deadline, self._end + _AFTER_LOAD_S)

    def may_begin(self) -> bool:
        """True if anything new may be sent."""
        return time.monotonic() < self._end and not self.stopped.is_set()

    @property
    def patience_s(self) -> float:
        """For how many seconds what was begun is still tried."""
        return max(0.0, self._deadline - time.monotonic())

    def has_patience(self) -> bool:
        """True if what was begun is still tried."""
        return time.monotonic() < self._deadline and not self.stopped.is_set()


class HubClient:
    """One principal. `urls`: gateways, of which each request takes one; more may be added meanwhile, and
    `answers_elsewhere` counts what those have answered. `sends` counts the requests that were sent, and
    `answered_by` is the gateway that has answered the last one.
    """

    def __init__(
        self, urls: Sequence[str], token: str, clock: Clock, seed: int, *, takes_refusals: bool = False
    ) -> None:
        self.urls = urls
        # Whether an answer that a limit refuses the request is the last one.
        self._takes_refusals = takes_refusals
        self.token, self._clock = token, clock
        self._draw = random.Random(seed)
        self._gateways: dict[tuple[str, str], sync_client.HubClient] = {}
        self.repeats = 0
        self.answers_elsewhere = 0
        self.sends = 0
        self.answered_by = ""

    def ask(
        self,
        method: str,
        path: str,
        *,
        key: str | None = None,
        duplicates: float = 0.0,
        says: Callable[[Answer], object] = lambda answer: answer.body,
        json: object = None,
        content: bytes = b"",
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> Answer:
        """The last answer. With some probability the request is sent once more, and must have the same answer:
        the same status, and the same in what `says` takes of it; where that was nothing, as of a mailbox that
        was empty, there may be something by now. `token`: another one than the client's. Raises GaveUp,
        AssertionError.
        """
        found = {"Idempotency-Key": key or uuid.uuid4().hex, **(headers or {})}
        if json is not None:
            found["Content-Type"] = "application/json"
            content = json_format.dumps(json, ensure_ascii=False).encode()
        request = Request(method, path, params, found, content)
        answer = self._final(request, token or self.token)
        if duplicates and self._draw.random() < duplicates:
            self.repeats += 1
            again = self._final(request, token or self.token)
            said = says(answer)
            if again.status != answer.status or (said and says(again) != said):
                raise AssertionError(f"{method} {path}, sent again: {shown(answer)}, then {shown(again)}")
            return again
        return answer

    def ask_known(self, method: str, path: str, **request: Any) -> Answer:
        """The answer about something that a gateway has acknowledged: where there are two, the other one may
        not have read of it yet and is asked again. Raises GaveUp.
        """
        while True:
            shares = len(self.urls) > 1
            answer = self.ask(method, path, **request)
            if answer.status not in _NOT_READ or not (shares or len(self.urls) > 1):
                return answer
            if not self._clock.has_patience():
                raise GaveUp(f"{method} {path}: {shown(answer)}")
            time.sleep(_PAUSE_S)

    def _final(self, request: Request, token: str) -> Answer:
        """Run the library's plan of a request that is sent until it is answered."""
        plan = exchange(request, Retries(self._clock.patience_s), self._is_final)
        outcome: Answer | Lost | None = None
        try:
            while True:
                step = plan.send(outcome)
                if isinstance(step, Pause):
                    self._pause(step.seconds)
                    outcome = None
                else:
                    outcome = self._once(step, token)
        except StopIteration as end:
            answer: Answer = end.value
            return answer
        except TrunklineError as error:
            raise GaveUp(f"{request.method} {request.path}: {error}") from None

    def _is_final(self, answer: Answer) -> bool:
        is_refusal = self._takes_refusals and answer.status == 429 and answer.json()["reason"] == "mailbox_full"
        return answer.status not in _AGAIN or is_refusal

    def _once(self, request: Request, token: str) -> Answer | Lost:
        """Send a request once, at one of the gateways."""
        url = self._draw.choice(list(self.urls))
        self.sends += 1
        # So the library does not repeat it over a new connection either, which would not be counted.
        outcome = self._gateway(url, token).run(single(replace(request, is_repeatable=False)))
        if isinstance(outcome, Answer) and self._is_final(outcome):
            self.answers_elsewhere += url != self.urls[0]
            self.answered_by = url
        return outcome

    def _gateway(self, url: str, token: str) -> sync_client.HubClient:
        found = self._gateways.get((url, token))
        if found is None:
            access = HubAccess(url, token)
            client = sync_client.HubClient(access, connect_timeout_s=_CONNECT_S, answer_timeout_s=_ANSWER_S)
            # Another thread may have made one meanwhile; this one has no connection yet.
            found = self._gateways.setdefault((url, token), client)
        return found

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and self._clock.has_patience():
            self._clock.stopped.wait(min(left_s, _PAUSE_S))

    def close(self) -> None:
        """Close the connections."""
        for gateway in list(self._gateways.values()):
            gateway.close()


def single(request: Request) -> Plan[Answer | Lost]:
    """The plan of one attempt."""
    return (yield request)


def shown(answer: Answer) -> str:
    """Return status and text of an answer, for people."""
    return f"{answer.status} {text_of(answer)[:200]}"


def text_of(answer: Answer) -> str:
    """Return the body of an answer as text."""
    return answer.body.decode(errors="replace")
