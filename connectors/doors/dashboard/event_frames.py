"""The dashboard's events: rows that have changed, the verdict of each record, and the figures of each second.

A frame holds the events of all records that were settled in a short time. A row that changed several times in
it is sent once, in its current state. Each record has its verdict. Only the last event of a frame has an id:
the log position after the frame. A reader that loses its connection within a frame gets the whole frame again.

The figures (`Pulse`) are settled records, the lag of live view and tables, and the depth of mailboxes. The
rates and the live view's lag are those of this gateway. The log, the tables and the mailboxes are the same at
all gateways.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import orjson

from connectors.doors.dashboard.boards import AgentBoard, MailboxBoard, worker_key
from connectors.doors.dashboard.past_records import is_shown, job_as_json, task_as_json, verdict_as_json
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.live.table_progress_reader import TableLag, ViewProgressReader
from connectors.hub.services.hub import Hub
from connectors.hub.services.settled_stream import AGENT_CHANGED, AGENT_CREATED, AGENT_EVENTS, AGENT_REMOVED
from schemas.fold.stream_kind import STOPPED
from schemas.streams.agents.agent_registry import AGENT_JOINED, AGENT_STOPPED
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.principal.principals import OPERATOR, VIEWER
from schemas.streams.task.task_registry import TASK_STARTED, TaskRow
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import AGENT, JOB, MAILBOX, TASK
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED

_SAID: Final = ("message_id", "from", "kind", "priority")


class Frame(NamedTuple):
    """The bytes of a frame in two versions: `full` for the operator, `public` for all other readers."""

    full: bytes
    public: bytes

    def of(self, role: str) -> bytes:
        """Return the frame's bytes, which are server-sent events, for a reader with this role."""
        return self.full if role == OPERATOR else self.public


def events_text(events: Mapping[str, Any], position: str) -> bytes:
    """Return the bytes of several server-sent events, in the order of `events`.

    `events` maps the name of each event to its data, which is written as JSON. It must not be empty. The last
    event gets the log position `position` as its id, and the others get none.
    """
    # orjson escapes line breaks, so each event's data is one line.
    parts = [f"event: {name}\ndata: ".encode() + orjson.dumps(data) for name, data in events.items()]
    return b"\n\n".join(parts) + f"\nid: {position}\n\n".encode()


class FrameWriter:
    """Makes frames from settled records, with the current rows of the live view."""

    def __init__(self, hub: Hub, board: AgentBoard) -> None:
        self._live_view = hub.live_view
        self._mailboxes = hub.mailboxes
        self._board = board

    def frame(self, records: Sequence[SettledRecord], position: str) -> Frame:
        """Return the frame, the bytes of server-sent events, for these settled records.

        Accepted records add the present rows of the agents, jobs, tasks and mailboxes that they have changed.
        Each record adds its verdict. `position` is the log position after the records, as text; it becomes the
        id of the frame's last event. A frame has one version for the operator and one for all other roles.
        """
        changes = self._changes([record for record in records if record.verdict == ACCEPTED])
        public = [verdict_as_json(record) for record in records if is_shown(record, VIEWER)]
        shown = events_text({**changes, "verdict": public}, position)
        if len(public) == len(records):
            return Frame(shown, shown)
        whole = [verdict_as_json(record) for record in records]
        return Frame(events_text({**changes, "verdict": whole}, position), shown)

    def _changes(self, records: Sequence[SettledRecord]) -> dict[str, Any]:
        touched: dict[str, dict[str, None]] = {AGENT: {}, JOB: {}, TASK: {}}
        messages, came, turned = [], set(), set()
        for record in records:
            kind, _, name = record.stream.partition("/")
            if record.type in (AGENT_JOINED, TASK_STARTED):
                came.add(name if kind == AGENT else worker_key(name))
            if record.type in (AGENT_JOINED, AGENT_STOPPED):
                turned.add(name)
            if kind in touched and (kind != AGENT or record.type in AGENT_EVENTS):
                touched[kind][name] = None
            elif kind == MAILBOX:
                messages.append(self._message(record, name))
        jobs = (self._live_view.get(JobRow, name) for name in touched[JOB])
        tasks = (self._live_view.get(TaskRow, name) for name in touched[TASK])
        found = {
            **_agent_events(self._board.changed(touched[AGENT], touched[TASK], turned), came),
            "job": [job_as_json(self._live_view, job) for job in jobs if job is not None],
            "task": [task_as_json(self._live_view, task) for task in tasks if task is not None],
            "message": messages,
        }
        return {name: data for name, data in found.items() if data}

    def _message(self, record: SettledRecord, mailbox: str) -> dict[str, Any]:
        """Return a change of a mailbox; a message that was posted is described without its body."""
        realm, _, recipient = mailbox.partition("/")
        said: Any = {}
        if record.type == MESSAGE_POSTED:
            with suppress(orjson.JSONDecodeError):
                said = orjson.loads(record.value or b"{}")
        return {
            "type": record.type,
            "realm": realm,
            "to": recipient,
            **({name: said.get(name) for name in _SAID} if isinstance(said, dict) and said else {}),
            "depth": self._mailboxes.depth((realm, recipient)),
            "dead": self._mailboxes.dead_count((realm, recipient)),
            "logged_ms": record.logged_at_us // 1000,
        }


def _agent_events(rows: Sequence[dict[str, Any]], came: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return rows of agents by the name of their event (AM-06). `came` holds the keys of the new rows."""
    found: dict[str, list[dict[str, Any]]] = {AGENT_CREATED: [], AGENT_CHANGED: [], AGENT_REMOVED: []}
    for row in rows:
        if row.get("gone") or row["status"] == STOPPED:
            found[AGENT_REMOVED].append(row)
        else:
            found[AGENT_CREATED if row["key"] in came else AGENT_CHANGED].append(row)
    return found


PULSE_S: Final = 1.0
_HISTORY: Final = 300


class Pulse:
    """The figures of the dashboard, computed once a second, with a history of five minutes.

    The live view's thread calls `settled`. Only one thread at a time may call `beat`. `mailboxes` is the result
    of `MailboxBoard.deepest` at the last call of `beat`, with empty values before the first.
    """

    def __init__(self, hub: Hub, board: MailboxBoard) -> None:
        self._hub = hub
        self._board = board
        self._lag = TableLag(hub.live_view)
        self._views = ViewProgressReader(hub.settings)
        self._lock = threading.Lock()
        self._verdicts: Counter[str] = Counter()
        self._lag_s = 0.0
        self._beat_at = time.monotonic()
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.mailboxes: dict[str, Any] = {"mailboxes": [], "messages": 0, "total": 0}

    def begin(self) -> None:
        """Reset the counts and the lag. Call this method once, when the live view is open.

        While the live view opens, it settles old records of the log. Without the reset, their age would be
        shown as the present lag.
        """
        with self._lock:
            self._verdicts.clear()
            self._lag_s = 0.0

    def settled(self, records: Sequence[SettledRecord]) -> None:
        """Count records by verdict for the next `beat`, and measure how long ago Kafka received the oldest one.

        The live view's thread calls this method with each batch of records that it has settled.
        """
        if not records:
            return
        now = time.time()
        oldest = min(record.logged_at_us for record in records) / 1e6
        with self._lock:
            self._lag_s = max(self._lag_s, now - oldest)
            for record in records:
                self._verdicts[record.verdict] += 1

    def beat(self) -> dict[str, Any]:
        """Return the figures since the last call as JSON, and append them to the history.

        The rates are for each second. This method reads the progress of the view tables from disk, so it must
        not run in the event loop. `tables_behind_records` and `tables_behind_ms` are None while there are no
        view tables, or while they cannot be read.
        """
        with self._lock:
            verdicts, self._verdicts = self._verdicts, Counter()
            lag_s, self._lag_s = self._lag_s, 0.0
        now = time.monotonic()
        seconds, self._beat_at = max(now - self._beat_at, 0.001), now
        self.mailboxes = self._board.deepest()
        records_behind, behind_ms = self._table_lag()
        figures = {
            "at_ms": round(time.time() * 1000),
            "settled_per_s": round(verdicts.total() / seconds, 1),
            **{verdict: verdicts[verdict] for verdict in (ACCEPTED, DUPLICATE, REJECTED)},
            "live_lag_ms": round(max(0.0, lag_s) * 1000),
            "live_lag_records": sum(self._hub.live_view.lag().values()),
            "tables_behind_records": records_behind,
            "tables_behind_ms": behind_ms,
            "messages": self.mailboxes["messages"],
        }
        self._history.append(figures)
        return {
            **figures,
            "jobs": self._hub.lists.jobs_by_state(),
            "kafka_is_away": self._hub.appender.away is not None,
            "webhooks": self._board.webhooks(),
        }

    def _table_lag(self) -> tuple[int, int] | tuple[None, None]:
        """Return the number of settled records that the view tables lack, and the oldest one's age in ms.

        Both are None while there are no tables or they cannot be read.
        """
        self._lag.look(self._hub.live_view.next_offsets())
        try:
            progress = self._views.read()
        except TrunklineError:
            progress = None
        if progress is None:
            return None, None
        lag = self._lag.behind(progress.offsets)
        return sum(lag.records.values()), round(lag.seconds * 1000)

    def history(self) -> list[dict[str, Any]]:
        """Return the figures of the last 300 calls of `beat` (about five minutes), oldest first.

        They have the keys of the result of `beat`, except `jobs`, `kafka_is_away` and `webhooks`, which matter
        only for the present.
        """
        return list(self._history)
