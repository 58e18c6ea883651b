"""Turns and limits of the messages that agents publish over MQTT (LM-05, LM-09), as the bridge enforces them.

At the broker all publishers share one queue to the bridge. The bridge reads ahead in it, and a message of one
publisher then waits for one message of each other publisher, and not for all that came before it.

A message beyond a limit is not appended to the log. Its sender gets a receipt with the reason, and the broker
the acknowledgement. The bridge reads the rates of the agents from the gateway. It learns from a verdict that a
mailbox is full, and then refuses messages to this mailbox for a second.

The bridge also counts what each account publishes at the stack's own broker, and reports it to the gateway
(LM-10), which pauses an account far beyond its rate. A report is made ten times a second, once more than 100
messages have arrived since the last one, so an idle bridge makes no request. A report that the gateway does not
take is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import structlog

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.mqtt_link.payloads import read_payload
from connectors.plumbing.network.rates import Backoff, FewRefusals, RoundRobin, TokenBuckets
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.refused.refusal import RefusalReason
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.hub_requests import post_json
from trunkline_agent.hub.plans import Retries
from trunkline_agent.wire.ids import AGENT, JOB
from trunkline_agent.wire.verdicts import MAILBOX_FULL, RATE_LIMITED, REJECTED

_T = TypeVar("_T")

# The bytes that may wait, and as many that may be under way. A message that exceeds them waits alone, so one of
# any size gets through.
BYTES_MOST: Final = 32 * 1024 * 1024


class FairQueue(Generic[_T]):
    """Messages in turns by publisher, and a bound on how many are handled at once. Thread-safe.

    The messages of one publisher keep their order. One thread calls `put`, one thread calls `take`, and
    any thread may call `done`.

    Args:
        under_way_most: The number of messages that may have been taken and not be done.
        of_each_most: The number of those that may be of one publisher.
        bytes_most: The bytes of the messages that may wait. No further message is taken while so many bytes are
            under way.
    """

    def __init__(self, under_way_most: int, of_each_most: int, bytes_most: int = BYTES_MOST) -> None:
        self._under_way_most = under_way_most
        self._of_each_most = of_each_most
        self._bytes_most = bytes_most
        self._changed = threading.Condition()
        self._waiting: RoundRobin[str, tuple[_T, int]] = RoundRobin()
        self._waiting_bytes = 0
        self._under_way: Counter[str] = Counter()
        # The sizes of those, by publisher in the order of their turns, and their sum.
        self._sizes: dict[str, deque[int]] = {}
        self._under_way_bytes = 0
        self._closed = False

    def put(self, publisher: str, message: _T, size: int) -> None:
        """Add a message of `size` bytes. Wait, without a time limit, while too many bytes wait.

        The message is dropped if the queue is closed, also while the call waits.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or not self._waiting_bytes or self._waiting_bytes + size <= self._bytes_most
                )
            )
            if self._closed:
                return
            self._waiting.push(publisher, (message, size))
            self._waiting_bytes += size
            self._changed.notify_all()

    def take(self) -> list[_T]:
        """Wait until messages may be handled, and return them in the order of their turns.

        They count as under way until `done` is called for each. Returns an empty list when the queue is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._has_place()))
            found: list[_T] = []
            while self._waiting and self._has_place() and not self._closed:
                publisher, (message, size) = self._waiting.pop()
                self._waiting_bytes -= size
                self._under_way[publisher] += 1
                self._sizes.setdefault(publisher, deque()).append(size)
                self._under_way_bytes += size
                if self._under_way[publisher] >= self._of_each_most:
                    self._waiting.hold(publisher)
                found.append(message)
            self._changed.notify_all()
            return found

    def done(self, publisher: str) -> None:
        """Note that a message of this publisher that was taken has been handled. Another one may then begin."""
        with self._changed:
            self._under_way[publisher] -= 1
            # Messages of one publisher are done in nearly their order, and all of them are.
            self._under_way_bytes -= self._sizes[publisher].popleft()
            if not self._under_way[publisher]:
                del self._under_way[publisher], self._sizes[publisher]
            self._waiting.release(publisher)
            self._changed.notify_all()

    def _has_place(self) -> bool:
        return self._under_way.total() < self._under_way_most and self._under_way_bytes < self._bytes_most

    def close(self) -> None:
        """Drop all messages that wait, and end the waits of `put` and `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


ROUTE: Final = "MQTT outbox"
FULL_S: Final = 1.0
_MOST: Final = 10_000


class Answer(NamedTuple):
    """The receipt of a message that is not appended. `retry_after_s` is at least 1, or None."""

    verdict: str | None
    reason: str | None
    retry_after_s: int | None


class _Said(msgspec.Struct):
    to: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"")


_said = msgspec.json.Decoder(_Said)


class OutboxLimits:
    """The limits of the agents of one broker. Thread-safe.

    A message that is in the log already is never refused, because its sender would believe that it is not
    there. So the bridge appends what the broker delivers again. For bytes that are among the newest 10,000
    appended, and beyond a limit now, it repeats the receipt.

    Args:
        record: Appends a record of a refusal to the log.
        clock: Returns seconds and never goes back.
    """

    def __init__(
        self, record: Callable[[OutgoingRecord], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals = FewRefusals(record, clock, door="mqtt")
        self._rates: TokenBuckets[tuple[str, str]] = TokenBuckets(1, 1, clock, _MOST)
        self._per_minute: dict[str, tuple[int | None, int | None]] = {}
        self._full_until: OrderedDict[str, float] = OrderedDict()
        # The messages appended last by the id of their record, with their receipts; None: not settled yet.
        self._appended: OrderedDict[str, Answer | None] = OrderedDict()

    def learn(self, agents: Iterable[Mapping[str, Any]]) -> None:
        """Replace the rates of all agents. `agents` are the objects of the gateway's list of MQTT agents."""
        found = {
            str(one["agent_name"]): (one.get("messages_per_minute"), one.get("bytes_per_minute"))
            for one in agents
        }
        with self._lock:
            self._per_minute = {name: rates for name, rates in found.items() if rates != (None, None)}

    def admit(self, agent: str, ce_id: str, payload: bytes, *, is_repeated: bool) -> Answer | None:
        """Count a message of an agent. Return None if it is to be appended, otherwise the receipt to send.

        A refusal is recorded, at a bounded rate. `ce_id` is the id of the message's record. `is_repeated` is
        whether the broker marks the message as delivered again.
        """
        said = read_payload(_said, payload) or _Said()
        with self._lock:
            known = self._appended.get(ce_id)
            refusal = None
            if not is_repeated and known is not None:
                refusal = self._too_often(agent, said)
            elif not is_repeated and ce_id not in self._appended:
                refusal = self._full(said) or self._too_often(agent, said)
            if refusal is None:
                self._remember(ce_id, known)
                return None
            reason: RefusalReason = "mailbox_full" if refusal.reason == MAILBOX_FULL else "rate_limited"
            self._refusals.record(reason, _WHY[reason], agent, ROUTE)
            return refusal if known is None else known

    def settled(self, ce_id: str, payload: bytes, verdict: str | None, reason: str | None) -> int | None:
        """Note the verdict on an appended message. Return after how many seconds it may be sent again.

        Returns None if no limit refused the message. `verdict` is None if it did not come in time, and `reason`
        is None if the message was not rejected.
        """
        said = read_payload(_said, payload) if reason == MAILBOX_FULL else None
        return self._settled(ce_id, None if said is None else said.to, verdict, reason)

    def late(self, ce_id: str, payload: bytes) -> Callable[[str | None, str | None], int | None]:
        """Return a function that notes a verdict on a message when its receipt has been sent without one.

        The function does not keep the payload, because there may be many that wait.
        """
        said = read_payload(_said, payload)
        return partial(self._settled, ce_id, None if said is None else said.to)

    def _settled(self, ce_id: str, to: str | None, verdict: str | None, reason: str | None) -> int | None:
        wait_s = _whole(FULL_S) if reason == MAILBOX_FULL else None
        with self._lock:
            self._remember(ce_id, Answer(verdict, reason, wait_s))
            if wait_s is not None and to is not None:
                self._full_until[to] = self._clock() + FULL_S
                self._full_until.move_to_end(to)
                if len(self._full_until) > _MOST:
                    self._full_until.popitem(last=False)
        return wait_s

    def _remember(self, ce_id: str, answer: Answer | None) -> None:
        self._appended[ce_id] = answer
        self._appended.move_to_end(ce_id)
        if len(self._appended) > _MOST:
            self._appended.popitem(last=False)

    def _full(self, said: _Said) -> Answer | None:
        until = None if said.to is None else self._full_until.get(said.to)
        left_s = 0.0 if until is None else until - self._clock()
        return Answer(REJECTED, MAILBOX_FULL, _whole(left_s)) if left_s > 0 else None

    def _too_often(self, agent: str, said: _Said) -> Answer | None:
        for what, count, per_minute in zip(
            ("messages", "bytes"), (1, len(said.body)), self._per_minute.get(agent, ()), strict=False
        ):
            if per_minute is None:
                continue
            wait_s = self._rates.take((agent, what), count, per_minute)
            if wait_s:
                return Answer(REJECTED, RATE_LIMITED, _whole(wait_s))
        return None


_WHY: Final[dict[RefusalReason, str]] = {
    "mailbox_full": "the mailbox is full",
    "rate_limited": "the agent publishes more messages or bytes a minute than it may",
}


def _whole(seconds: float) -> int:
    return max(1, round(seconds))


log = structlog.stdlib.get_logger(__name__)

REPORT_S: Final = 0.1
REPORT_ABOVE: Final = 100
# The most accounts in a report, which is the most that the gateway takes, and the most that are counted.
_REPORTED: Final = 1000
_COUNTED: Final = 10_000
_ANSWER_S: Final = 2.0
_AGAIN_S: Final = 1.0
_END_S: Final = 5.0
# A report that is repeated would count again.
_ONE_ATTEMPT: Final = Retries(patience_s=0)
_FIELDS: Final = {AGENT: "agents", JOB: "jobs"}


class PublishCounts:
    """The number of messages of each job and agent since the last `take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._messages = 0

    def count(self, stream: str) -> None:
        """Count a message. `stream` is the stream of its record. Streams of no job and no agent are ignored."""
        if stream.partition("/")[0] not in _FIELDS:
            return
        with self._lock:
            if stream in self._counts or len(self._counts) < _COUNTED:
                self._counts[stream] += 1
                self._messages += 1

    def take(self) -> dict[str, dict[str, int]] | None:
        """Return the messages by agent and by job, as the gateway takes them, and count from 0 again.

        Returns None while there are no more than 100 messages, which stay counted. Of very many accounts only
        those with the most messages are returned.
        """
        with self._lock:
            if self._messages <= REPORT_ABOVE:
                return None
            counts, self._counts, self._messages = self._counts, Counter(), 0
        found: dict[str, dict[str, int]] = {"agents": {}, "jobs": {}}
        for stream, messages in counts.most_common(_REPORTED):
            kind, _, name = stream.partition("/")
            found[_FIELDS[kind]][name] = messages
        return found


class LoadReports:
    """The thread that reports the counts to the gateway, from `start` until the event `stop` is set."""

    def __init__(self, settings: Settings, stop: threading.Event, counts: PublishCounts) -> None:
        self._settings = settings
        self._stop = stop
        self._counts = counts
        self._pauses = Backoff(_AGAIN_S)
        self._thread = threading.Thread(target=self._run, name="mqtt-load", daemon=True)

    def start(self) -> None:
        """Start the thread, and return at once."""
        self._thread.start()

    def join(self) -> None:
        """Wait at most 5 s for the thread to end. Call it after `stop` was set."""
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._report_all()
            except (TrunklineError, SettingsError) as error:
                if self._pauses.is_to_log(str(error)):
                    log.warning("load_not_reported", why=str(error))
            except Exception:
                log.exception("load_reports_failed")
            self._stop.wait(_AGAIN_S)

    def _report_all(self) -> None:
        """Report until `stop` is set, or until a report fails."""
        with GatewayClient(self._settings, answer_timeout_s=_ANSWER_S) as hub:
            while not self._stop.wait(REPORT_S):
                report = self._counts.take()
                if report is None:
                    continue
                paused = hub.run(post_json(path_of("mqtt-load"), report, retries=_ONE_ATTEMPT))
                if any(paused.values()):
                    log.warning("publishing_paused", **paused)
