"""The plans of a delegator, without input and output: submit and cancel a job, and watch its events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trunkline_agent.errors import BackboneUnreachable, RateLimited, TrunklineError, UsageError
from trunkline_agent.hub.http_exchange import ServerEvent
from trunkline_agent.hub.hub_requests import encoded, path_of, post_json, send_key
from trunkline_agent.hub.plans import Plan, Request, Retries, backoff_s
from trunkline_agent.wire.ids import is_job_id
from trunkline_agent.wire.receipt import LogPosition
from trunkline_agent.wire.verdicts import ACCEPTED

PATIENCE_S: Final = 30.0
CANCELLED: Final = "cancelled"
ENDS: Final = frozenset({"completed", "error", CANCELLED})
_JOB_EVENT: Final = "job.event"
_SNAPSHOT: Final = "snapshot"
_SETTLED: Final = "settled"
_FIRST_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job that was submitted.

    Attributes:
        job_id: Its id.
        secret: The secret with which its events are signed. The hub does not show it again. It is in no `repr`.
        position: The position of this request's record in the log.
    """

    job_id: str
    secret: str = field(repr=False)
    position: LogPosition


def submission(
    description: str,
    session: str | None,
    notify: Sequence[str] | None,
    broker: Mapping[str, Any] | None,
    key: str | None,
    patience_s: float,
) -> Plan[SubmittedJob]:
    """Register a job. See `Delegator.submit`."""
    body: dict[str, Any] = {
        "description": description,
        "session": session,
        "notify": None if notify is None else list(notify),
        "broker": None if broker is None else dict(broker),
    }
    if key is None:
        # The broker may have a password, of which no digest belongs into the log.
        hashed = {name: body[name] for name in ("description", "session", "notify") if body[name] is not None}
        key = send_key("job", encoded(hashed), None).text
    answer = yield from post_json(path_of("jobs"), body, retries=Retries(patience_s), key=key)
    try:
        return SubmittedJob(answer["job_id"], answer["secret"], LogPosition(*answer["position"]))
    except (KeyError, TypeError):
        raise _no_gateway() from None


def cancellation(job_id: str, reason: str, key: str | None, patience_s: float) -> Plan[str]:
    """Cancel a job. See `Delegator.cancel`."""
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    path = path_of("jobs", job_id, "cancel")
    answer = yield from post_json(path, {"reason": reason}, retries=Retries(patience_s), key=key)
    try:
        return str(answer["status"])
    except (KeyError, TypeError):
        raise _no_gateway() from None


def _no_gateway() -> TrunklineError:
    return TrunklineError("the answer is not that of a Trunkline gateway", reason="not_a_gateway")


class WatchTimeout(TrunklineError):
    """The time of a watch ran out before the job ended.

    Attributes:
        timer: `total` or `idle`.
    """

    exit_code = 2
    reason = "watch_timeout"
    advice = "the job goes on; watch it again or cancel it"

    def __init__(self, *args: object, timer: str = "total", **more: Any) -> None:
        super().__init__(*args, **more)
        self.timer = timer


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """An accepted event of a job, or a change of its state.

    Attributes:
        job_id: The job.
        event: The type of the event, such as `progress`. For a state that no event of the job made, or whose
            event was missed: the state, such as `cancelled`.
        status: The state of the job afterwards: `running`, `completed`, `error` or `cancelled`.
        detail: The text of the event.
        data: The data of the event, without its signature.
        seq: The number of the event within its job. None: it is no event of the job.
        logged_at: The time at which the log stored it, in ISO 8601. None: unknown.
    """

    job_id: str
    event: str
    status: str
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    seq: int | None = None
    logged_at: str | None = None

    @property
    def is_end(self) -> bool:
        """True if the job has ended."""
        return self.status in ENDS


class JobWatch:
    """The state of one watch. The caller does the input and output.

    Args:
        job_id: The job.
        idle_timeout_s: The longest time without an accepted event; None: no limit.
        total_timeout_s: The longest time of the watch; None: no limit.
        patience_s: The longest time without a connection to the hub.
        clock: Returns a monotonic time in seconds.
    """

    def __init__(
        self,
        job_id: str,
        idle_timeout_s: float | None,
        total_timeout_s: float | None,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not is_job_id(job_id):
            raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
        self._job_id = job_id
        self._idle_s = math.inf if idle_timeout_s is None else idle_timeout_s
        self._total_s = math.inf if total_timeout_s is None else total_timeout_s
        self._patience_s, self._clock = patience_s, clock
        self._begun = self._last = self._connected = clock()
        self._last_id: str | None = None
        self._failures = 0

    def request(self) -> Request:
        """Return the request of the stream, which goes on after the last event that was taken."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
        if self._last_id is not None:
            headers["Last-Event-ID"] = self._last_id
        return Request("GET", path_of("jobs", self._job_id, "events"), headers=headers)

    def left_s(self) -> float:
        """Return the seconds until the first time limit, infinite without limits.

        Raises WatchTimeout after a limit.
        """
        now = self._clock()
        if now >= self._begun + self._total_s:
            raise WatchTimeout(f"job {self._job_id} has not ended within {self._total_s:g} s")
        if now >= self._last + self._idle_s:
            raise WatchTimeout(f"job {self._job_id}: no event for {self._idle_s:g} s", timer="idle")
        return min(self._begun + self._total_s, self._last + self._idle_s) - now

    def take(self, event: ServerEvent) -> JobUpdate | None:
        """Take an event of the stream. Return what it says of the job, None if nothing has changed.

        Raises TrunklineError if the event is not that of a gateway.
        """
        self._connected, self._failures = self._clock(), 0
        self._last_id = event.id or self._last_id
        try:
            found = self._update(event.name, event.json())
        except (KeyError, TypeError, AttributeError):
            raise TrunklineError(
                "the stream is not that of a Trunkline gateway", reason="not_a_gateway"
            ) from None
        if found is not None:
            self._last = self._clock()
        return found

    def pause_s(self, error: BackboneUnreachable | RateLimited | None) -> float:
        """Count an end of the stream, and return the seconds to wait before it is opened again.

        They are more after each call until the stream has an event, and at least the error's `retry_after_s`.

        Args:
            error: Why it ended; None: the gateway ended it. It is raised if the last event came more than
                `patience_s` seconds ago.
        """
        if error is not None and self._clock() - self._connected > self._patience_s:
            raise error
        found = backoff_s(self._failures, _FIRST_PAUSE_S)
        self._failures += 1
        return max(found, getattr(error, "retry_after_s", None) or 0.0)

    def _update(self, name: str, data: Any) -> JobUpdate | None:
        if name == _SNAPSHOT:
            row = data["row"]
            # After a gap, the event that ended the job may be among those that were missed.
            if row is None or row["status"] not in ENDS:
                return None
            return JobUpdate(self._job_id, row["status"], row["status"], row.get("last_detail") or "")
        if name != _SETTLED or data["verdict"] != ACCEPTED:
            return None
        status, logged_at = data["status_after"], data.get("logged_at")
        if data["type"] != _JOB_EVENT:
            return JobUpdate(self._job_id, status, status, logged_at=logged_at) if status in ENDS else None
        body = data["body"]
        shown = {key: value for key, value in body["data"].items() if key != "hmac_sig"}
        return JobUpdate(self._job_id, body["event"], status, body["detail"], shown, body["seq"], logged_at)
