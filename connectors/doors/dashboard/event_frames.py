"""Server-sent events made of settled records: rows that have changed, and the verdict of each record.

A frame holds the events of all records that were settled in a short time. A row that changed several times in
it is sent once, in its current state. Each record has its verdict. Only the last event of a frame has an id:
the log position after the frame. A reader that loses its connection within a frame gets the whole frame again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import orjson

from connectors.doors.dashboard.agent_board import AgentBoard, worker_key
from connectors.doors.dashboard.shown_rows import is_shown, job_as_json, task_as_json, verdict_as_json
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.services.settled_stream import AGENT_CHANGED, AGENT_CREATED, AGENT_EVENTS, AGENT_REMOVED
from schemas.fold.life_cycles import STOPPED
from schemas.streams.agents.participants import AGENT_JOINED, AGENT_STOPPED
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.principal.principals import OPERATOR, VIEWER
from schemas.streams.task.task_registry import TASK_STARTED, TaskRow
from trunkline_agent.wire.ids import AGENT, JOB, MAILBOX, TASK
from trunkline_agent.wire.verdicts import ACCEPTED

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
