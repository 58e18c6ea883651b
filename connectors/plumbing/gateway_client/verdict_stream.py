"""The gateway's verdicts on records of the bridges (JE-17, LM-08): one HTTP stream that is kept open.

**Reads** `GET /api/hub/verdicts` (NDJSON, operator's token), and reconnects with back-off for ever.
**Guarantees** that each question is answered once: with the verdict when it comes in time, and otherwise with
None. While the stream is down the answer is None at once, so a gateway that is down delays no receipt.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing
from typing import Final

import msgspec
import structlog

from connectors.plumbing.gateway_client.gateway_access import explained, read_token
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.plumbing.network.rates import Backoff
from schemas.settings.settings import Settings
from schemas.wire.record import Position
from trunkline_agent.errors import Refused, TrunklineError
from trunkline_agent.hub.plans import Request

log = structlog.stdlib.get_logger(__name__)

Answer = Callable[[str | None, str | None], object]

VERDICTS_PATH: Final = "/api/hub/verdicts"
_DEFAULT_DOOR: Final = "mqtt"
# The gateway writes at least every second; one that is silent for longer hangs.
_SILENCE_S: Final = 3.0
_BACKOFF_MAX_S: Final = 2.0
_KEPT: Final = 10_000
_STOP_S: Final = 1.0
_TICK_S: Final = 0.02
_LOST: Final = (TrunklineError, msgspec.MsgspecError, OSError)


class _Line(msgspec.Struct):
    settled: list[tuple[int, int, str, str | None]] = []


class VerdictStream:
    """The gateway's verdicts on records, read from one HTTP stream. Thread-safe.

    Call `start` first and `close` at the end. A callback runs on the thread that calls `ask` or on one of the
    stream's two threads, and must not block.

    Args:
        settings: The settings with the gateway's address.
        wait_s: How long a question waits for its verdict, in seconds.
        door: The door whose records the verdicts are about, `mqtt` or `file`.
    """

    def __init__(self, settings: Settings, wait_s: float, door: str = _DEFAULT_DOOR) -> None:
        self._settings = settings
        self._wait_s = wait_s
        self._wanted = {} if door == _DEFAULT_DOOR else {"door": door}
        self._lock = threading.Condition()
        self._up = False
        self._early: OrderedDict[tuple[int, int], tuple[str, str | None]] = OrderedDict()
        self._waiting: dict[tuple[int, int], Answer] = {}
        # The callbacks for verdicts that did not come in time.
        self._late: OrderedDict[tuple[int, int], Answer] = OrderedDict()
        self._deadlines: deque[tuple[float, tuple[int, int]]] = deque()  # rising: the wait is the same for all
        self._stop = threading.Event()
        self._complained = False
        self._threads = [
            threading.Thread(target=self._keep_open, name="verdicts", daemon=True),
            threading.Thread(target=self._time_out, name="verdict-timeouts", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads that read the stream and reconnect it. Returns at once."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Close the stream and stop its threads, which takes at most 2 s.

        All waiting callbacks get the verdict None.
        """
        self._stop.set()
        self._set_down()
        for thread in self._threads:
            thread.join(_STOP_S)

    @property
    def up(self) -> bool:
        """True if the HTTP stream is open now.

        While it is not, `ask` calls back at once with the verdict None.
        """
        return self._up

    def ask(self, position: Position, answer: Answer, late: Answer | None = None) -> None:
        """Call `answer(verdict, reason)` once, when the gateway has settled the record at `position`.

        Does not wait. `verdict` is accepted, duplicate or rejected. It is None when no verdict comes within
        `wait_s`, or when the stream is not open or is lost. `reason` says why a record was rejected; otherwise
        it is None. A verdict that comes after that time goes to `late`, if it is among the last 10,000 and the
        stream is not lost.
        """
        key = (position.partition, position.offset)
        with self._lock:
            found = self._early.pop(key, None)
            if found is None and self._up and self._wait_s > 0:
                self._waiting[key] = answer
                if late is not None:
                    self._late[key] = late
                    if len(self._late) > _KEPT:
                        self._late.popitem(last=False)
                self._deadlines.append((time.monotonic() + self._wait_s, key))
                if len(self._deadlines) == 1:
                    self._lock.notify_all()
                return
        answer(*(found or (None, None)))

    def _keep_open(self) -> None:
        backoff = Backoff(most_s=_BACKOFF_MAX_S)
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._read()
                why = "the gateway ended the stream"
            except _LOST as error:
                why = explained(error.__cause__ or error)
            except Exception as error:  # any other error must not end the verdicts for good
                log.exception("verdicts_failed")
                why = type(error).__name__
            was_up = self._set_down()
            if self._stop.is_set():
                return
            if was_up or not self._complained:
                self._complained = True
                log.warning("verdicts_away", error=why, gateway=self._settings.gateway_url)
            if time.monotonic() - began > _BACKOFF_MAX_S:
                backoff.reset()
            self._stop.wait(backoff.next_s())

    def _read(self) -> None:
        if read_token(self._settings) is None:
            raise Refused("there is no operator's token yet")
        decoder = msgspec.json.Decoder(_Line)
        with (
            GatewayClient(self._settings, answer_timeout_s=_SILENCE_S) as hub,
            closing(hub.parts(Request("GET", VERDICTS_PATH, self._wanted), _SILENCE_S)) as parts,
        ):
            rest = next(parts)
            with self._lock:
                self._up = not self._stop.is_set()
            log.info("verdicts_open", gateway=self._settings.gateway_url)
            for part in parts:
                if self._stop.is_set():
                    return
                *lines, rest = (rest + part).split(b"\n")
                for line in filter(None, lines):
                    self._take(decoder.decode(line))

    def _take(self, line: _Line) -> None:
        settled: list[tuple[Answer, str, str | None]] = []
        with self._lock:
            for partition, offset, verdict, reason in line.settled:
                key = (partition, offset)
                late = self._late.pop(key, None)
                answer = self._waiting.pop(key, None) or late
                if answer is not None:
                    settled.append((answer, verdict, reason))
                    continue
                self._early[key] = (verdict, reason)
                if len(self._early) > _KEPT:
                    self._early.popitem(last=False)
        for answer, verdict, reason in settled:
            _call(answer, verdict, reason)

    def _set_down(self) -> bool:
        """Answer all waiting questions with None. Returns whether the stream was up."""
        with self._lock:
            was_up, self._up = self._up, False
            left = list(self._waiting.values())
            self._waiting.clear()
            self._late.clear()
            self._deadlines.clear()
            self._lock.notify_all()
        for answer in left:
            _call(answer, None, None)
        return was_up

    def _time_out(self) -> None:
        while not self._stop.is_set():
            late: list[Answer] = []
            with self._lock:
                while not self._deadlines and not self._stop.is_set():
                    self._lock.wait()
                now = time.monotonic()
                while self._deadlines and self._deadlines[0][0] <= now:
                    answer = self._waiting.pop(self._deadlines.popleft()[1], None)
                    if answer is not None:
                        late.append(answer)
                # No other is due before the first. Answers that are due at nearly the same time go together.
                pause_s = max(self._deadlines[0][0] - now, _TICK_S) if self._deadlines else 0.0
            for answer in late:
                _call(answer, None, None)
            self._stop.wait(pause_s)


def _call(answer: Answer, verdict: str | None, reason: str | None) -> None:
    try:
        answer(verdict, reason)
    except Exception:  # one receipt must not end the thread that all others need
        log.exception("receipt_failed")
