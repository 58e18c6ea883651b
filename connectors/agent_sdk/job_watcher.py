"""The verdicts of a subscriber to job events: the fold's rule (JE-09), run over the messages of one job.

The subscriber settles each message with `schemas.streams.fold.settle`, as the backbone does, on stream state of
its own. That state begins with a registration made here from the job's stored secret. A rotation is added when
the secret was rotated.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from connectors.job_tools.job_secrets import KeptSecrets
from connectors.mqtt_bridge.bridge_records import job_event_record
from schemas.fold.entries import Entries
from schemas.fold.life_cycles import COMPLETED, JOB_TERMINAL
from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import registration_record, rotation_record
from schemas.wire.record import OutgoingRecord, Record, oversized
from schemas.wire.strict_json import decode
from schemas.wire.verdicts import ACCEPTED, BAD_SIGNATURE
from schemas.wire.wire_body import OVERLAP_LIMIT_MS

EXIT_COMPLETED: Final = 0
EXIT_FAILED: Final = 1
EXIT_TIMED_OUT: Final = 2
_KEY_BYTES: Final = 32


class Sight(NamedTuple):
    """What a source of events tells of a job: its status now (None: unknown), an accepted event as a line to
    print, a note for the log. `before`: it had ended before anybody watched.
    """

    job_id: str
    status: str | None = None
    line: str | None = None
    note: str | None = None
    before: bool = False


class JobWatcher:
    """Settles the messages of one job with the secret that is stored for it. `kept`: what is stored now; it is
    asked again when a signature does not fit, because the secret may have been rotated.
    """

    def __init__(
        self,
        settings: Settings,
        job_id: str,
        secret: str,
        kept: Callable[[], KeptSecrets | None] = lambda: None,
    ) -> None:
        self.job_id = job_id
        self._prefix = settings.mqtt.topic_prefix
        self._limit = settings.limits.payload_bytes
        # The secret is sealed and opened here alone; the backbone's master key is not needed.
        self._keyring = Keyring({"watch": secrets.token_bytes(_KEY_BYTES)}, "watch")
        self._entries = Entries()
        self._offset = 0
        self._kept = kept
        found = kept() or KeptSecrets(secret)
        self._secret = found.former or secret
        self._settle(registration_record(job_id, self._secret, "", self._keyring))
        self._rotate(KeptSecrets(secret, found.former, found.former_ends_at))

    def settle(self, topic: str, payload: bytes, traceparent: str | None = None) -> Settled:
        """The fold's verdict on one MQTT message. Raises as `kept` does."""
        record = job_event_record(self._prefix, topic, payload, traceparent)
        settled = self._settle(record)
        if settled.reason == BAD_SIGNATURE and self._rotate(self._kept()):
            return self._settle(record)
        return settled

    def _rotate(self, found: KeptSecrets | None) -> bool:
        """Go on with another secret. Returns whether it is another one."""
        if found is None or found.secret == self._secret:
            return False
        # Good for as long as the backbone said; when that was, the log's clock knows better.
        left_ms = round((found.former_ends_at - time.time()) * 1000)
        overlap_ms = max(0, min(left_ms, OVERLAP_LIMIT_MS)) if found.former == self._secret else 0
        request_id = f"r{self._offset}"
        self._secret = found.secret
        self._settle(
            rotation_record(self.job_id, found.secret, overlap_ms, self._keyring, request_id=request_id)
        )
        return True

    def see(self, topic: str, payload: bytes, traceparent: str | None = None) -> Sight:
        """The same as a Sight: an accepted event has a line; of another, a note says why it does not count."""
        settled = self.settle(topic, payload, traceparent)
        if settled.verdict != ACCEPTED:
            told = settled.verdict if settled.reason is None else f"{settled.reason}: {settled.why}"
            seq = "" if settled.seq is None else f" with seq {settled.seq}"
            return Sight(self.job_id, note=f"an event{seq} does not count: {told}")
        return Sight(self.job_id, settled.status_after, event_line(settled.shown or payload))

    def _settle(self, outgoing: OutgoingRecord) -> Settled:
        record = oversized(outgoing, self._limit)
        headers = record.headers()
        names, values = tuple(name for name, _ in headers), tuple(value for _, value in headers)
        moment_us = time.time_ns() // 1000
        local = Record("watch", 0, self._offset, moment_us, record.key, record.value, names, values)
        self._offset += 1
        return settle(local, self._entries, self._keyring)


def event_line(body: bytes) -> str:
    """An accepted event as one JSON line, ASCII only: nothing in it is obeyed by a terminal."""
    return json.dumps(decode(body)[0], separators=(",", ":"))


class Outcomes:
    """Which jobs are followed, and how each ended; says when a watch is over and its exit code (JE-21).

    `open_ended`: jobs that nobody named are followed from their first event, too.
    """

    def __init__(self, jobs: Iterable[str], *, open_ended: bool = False) -> None:
        self._status: dict[str, str | None] = dict.fromkeys(jobs)
        self._open_ended = open_ended

    def follows(self, job_id: str) -> bool:
        """Whether a job's events are wanted."""
        return self._open_ended or job_id in self._status

    def take(self, sight: Sight) -> Sight:
        """Note a job's status; returns what remains to be told: of an end that is known already, a note."""
        known = self._status.get(sight.job_id)
        if sight.before and self._open_ended and known is None:
            self._status.pop(sight.job_id, None)
            return sight
        if known in JOB_TERMINAL:
            if sight.line is None and sight.status == known:
                return sight._replace(note=None)
            told = sight.note or f"an event after its end ({known}) is ignored"
            return sight._replace(line=None, note=told)
        self._status[sight.job_id] = sight.status or known
        return sight

    def exit_code(self) -> int | None:
        """0 when all have completed, 1 when all have ended and one has not completed, None before."""
        if not self._status or any(status not in JOB_TERMINAL for status in self._status.values()):
            return None
        return EXIT_COMPLETED if set(self._status.values()) == {COMPLETED} else EXIT_FAILED

    def open_jobs(self) -> list[str]:
        """The jobs that have not ended, as far as was seen."""
        return sorted(job for job, status in self._status.items() if status not in JOB_TERMINAL)


class Timers:
    """The two timers of a watch (JE-21): a budget from the start, and an idle time since the last event."""

    def __init__(self, timeout_s: float | None, idle_timeout_s: float | None) -> None:
        self._idle_s = idle_timeout_s
        self._total_s = timeout_s
        self._started = self._last = time.monotonic()

    def restart_idle(self) -> None:
        """An event was accepted."""
        self._last = time.monotonic()

    def left_s(self) -> float:
        """Seconds until the first of them runs out; infinite without timers."""
        now, ends = time.monotonic(), []
        if self._total_s is not None:
            ends.append(self._started + self._total_s)
        if self._idle_s is not None:
            ends.append(self._last + self._idle_s)
        return min(ends) - now if ends else float("inf")

    def ran_out(self) -> str:
        """Which one it was, in words."""
        over = self._total_s is not None and time.monotonic() >= self._started + self._total_s
        return f"the time of {self._total_s:g} s ran out" if over else f"no event for {self._idle_s:g} s"
