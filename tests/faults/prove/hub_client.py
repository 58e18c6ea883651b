"""A client of the hub that asks again, with the same key, until it is answered."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx

_PAUSE_S: Final = 0.15
_TIMEOUT_S: Final = 8.0
# Not 500: nobody may say that.
_AGAIN: Final = (408, 425, 429, 503, 504)
# A gateway answers so while it has not read a stream yet: 404 for its object, 401 for its token.
_NOT_READ: Final = (401, 404)


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

    def may_begin(self) -> bool:
        """True if anything new may be sent."""
        return time.monotonic() < self._end and not self.stopped.is_set()

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
        self._clock = clock
        self._draw = random.Random(seed)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=_TIMEOUT_S, trust_env=False
        )
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
        says: Callable[[httpx.Response], object] = lambda answer: answer.content,
        **request: Any,
    ) -> httpx.Response:
        """The last answer. With some probability the request is sent once more, and must have the same answer:
        the same status, and the same in what `says` takes of it; where that was nothing, as of a mailbox that
        was empty, there may be something by now. Raises GaveUp, AssertionError.
        """
        headers = {"Idempotency-Key": key or uuid.uuid4().hex, **request.pop("headers", {})}
        answer = self._once(method, path, headers, request)
        if duplicates and self._draw.random() < duplicates:
            self.repeats += 1
            again = self._once(method, path, headers, request)
            said = says(answer)
            if again.status_code != answer.status_code or (said and says(again) != said):
                raise AssertionError(f"{method} {path}, sent again: {_said(answer)}, then {_said(again)}")
            return again
        return answer

    def ask_known(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The answer about something that a gateway has acknowledged: where there are two, the other one may
        not have read of it yet and is asked again. Raises GaveUp.
        """
        while True:
            shares = len(self.urls) > 1
            answer = self.ask(method, path, **request)
            if answer.status_code not in _NOT_READ or not (shares or len(self.urls) > 1):
                return answer
            if not self._clock.has_patience():
                raise GaveUp(f"{method} {path}: {_said(answer)}")
            time.sleep(_PAUSE_S)

    def _once(self, method: str, path: str, headers: dict[str, str], request: dict[str, Any]) -> httpx.Response:
        while True:
            try:
                url = self._draw.choice(list(self.urls))
                self.sends += 1
                answer = self._http.request(method, url + path, headers=headers, **request)
                if answer.status_code not in _AGAIN or self._is_refusal(answer):
                    self.answers_elsewhere += url != self.urls[0]
                    self.answered_by = url
                    return answer
            except httpx.TransportError:
                pass
            if not self._clock.has_patience():
                raise GaveUp(f"{method} {path}")
            time.sleep(_PAUSE_S)

    def _is_refusal(self, answer: httpx.Response) -> bool:
        return self._takes_refusals and answer.status_code == 429 and answer.json()["reason"] == "mailbox_full"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def _said(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.text[:200]}"
