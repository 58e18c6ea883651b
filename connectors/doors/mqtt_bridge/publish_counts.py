"""Counts what each account publishes at the stack's own broker, and reports it to the gateway (LM-10).

The gateway pauses an account that publishes far beyond its rate. A report is made ten times a second, once
more than 100 messages have arrived since the last one, so an idle bridge makes no request. A report that the
gateway does not take is dropped.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

import structlog

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.settings.settings import Settings, SettingsError
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub.hub_requests import post_json
from trunkline_agent.hub.plans import Retries
from trunkline_agent.wire.ids import AGENT, JOB

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
        self._complaint = ""
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
                self._complain(str(error))
            except Exception:
                log.exception("load_reports_failed")
            self._stop.wait(_AGAIN_S)

    def _report_all(self) -> None:
        """Report until `stop` is set, or until a report fails."""
        with GatewayClient(self._settings) as gateway, gateway.new_hub(_ANSWER_S) as hub:
            while not self._stop.wait(REPORT_S):
                report = self._counts.take()
                if report is None:
                    continue
                paused = hub.run(post_json(path_of("mqtt-load"), report, retries=_ONE_ATTEMPT))
                self._complaint = ""
                if any(paused.values()):
                    log.warning("publishing_paused", **paused)

    def _complain(self, why: str) -> None:
        """Log why a report failed, once and not in each round."""
        if why != self._complaint:
            self._complaint = why
            log.warning("load_not_reported", why=why)
