"""Gathers what there is in the end: ledger, view tables, a new live view, a gateway's answers, a refold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa

from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.hub.live.live_view import LiveView
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_CLAIMED
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_BODIES
from schemas.streams.task.task_registry import REGISTRY_TASKS
from tests.faults import backbone_states
from tests.faults.prove.comparison import Evidence, Line, Mail, Shown
from tests.faults.prove.oracle import content_hash
from trunkline_agent.wire.verdicts import ACCEPTED

_LEDGER = (
    "partition",
    "offset",
    "stream_kind",
    "stream_id",
    "type",
    "verdict",
    "ce_id",
    "seq",
    "value",
    "status_after",
    "reason",
)


def gather(settings: Settings, gateways: dict[str, str], file_readers: Sequence[str]) -> Evidence:
    """All of it; the backbone must be quiet. `gateways`: where each of them answers, by name. `file_readers`:
    the names of those who read by file.
    """
    ledger, tables = backbone_states.ledger_in_order(settings), backbone_states.state_of_tables(settings)
    keyring = load_keyring(settings)
    view = LiveView(settings, keyring)
    view.open()
    try:
        live = backbone_states.state_of_live_view(view, tables["entries"].keys())
    finally:
        view.close()
    found: list[str] = []
    try:
        refolded = backbone_states.state_of_refold(ledger, keyring)
        found += [f"views | refold: {text}" for text in backbone_states.differences(tables, refolded)]
        found += [f"live view | refold: {text}" for text in backbone_states.differences(live, refolded)]
    except AssertionError as error:
        found.append(f"a refold has another verdict: {error}")
    views, shown_live = shown("views", tables), shown("live view", live)
    boxes = {stream for stream, _ in views.mail}
    others = [shown_live, *(answered(name, url, settings, boxes) for name, url in gateways.items())]
    return Evidence(lines_of(ledger), views, others, found, in_files(settings, file_readers))


def in_files(settings: Settings, names: Sequence[str]) -> Counter[tuple[str, str]]:
    """How often each message for one of these names stands in the file queue, by mailbox and id."""
    found: Counter[tuple[str, str]] = Counter()
    for path in Path(queue_root(settings)).glob("sessions/*/messages.jsonl"):
        # A line that is still being written has no newline yet.
        for text in path.read_bytes().split(b"\n")[:-1]:
            line = json.loads(text)
            if line["to"] in names:
                found[f"mailbox/{path.parent.name}/{line['to']}", line["msg_id"]] += 1
    return found


def lines_of(ledger: pa.Table) -> list[Line]:
    """The ledger's rows."""
    rows = ledger.select(list(_LEDGER)).to_pylist()
    return [_line(row) for row in rows]


def _line(row: dict[str, Any]) -> Line:
    name, found = row["ce_id"] or "", ""
    if row["type"] in ("job.registered", "task.started", "job.event", "message.posted"):
        try:
            said = json.loads(row["value"])
            if row["type"] in ("job.registered", "task.started"):
                name, found = row["type"].partition(".")[2], content_hash(said["description"])
            elif row["type"] == "job.event":
                name, found = str(row["seq"]), content_hash(said["event"], said["detail"])
            else:
                name, found = said["message_id"], content_hash(said["from"], said["to"], said["body"])
        except (ValueError, KeyError, TypeError):
            pass  # what is no event and no message is rejected, and compared with nothing
    request = ""
    if row["type"] == MESSAGE_CLAIMED and row["verdict"] == ACCEPTED:
        request = json.loads(row["value"])["request_id"]
    return Line(
        partition=row["partition"],
        offset=row["offset"],
        stream=f"{row['stream_kind']}/{row['stream_id']}",
        type=row["type"] or "",
        verdict=row["verdict"],
        id=name,
        hash=found,
        status_after=row["status_after"] or "",
        ce_id=row["ce_id"] or "",
        reason=row["reason"] or "",
        request=request,
    )


def shown(name: str, state: backbone_states.State) -> Shown:
    """Jobs, tasks and messages of a state."""
    rows, found = state["rows"], Shown(name)
    for kind, view in (("job", REGISTRY_JOBS), ("task", REGISTRY_TASKS)):
        found.states |= {f"{kind}/{key}": row["status"] for key, (_, row) in rows[view].items()}
    for key, (_, row) in rows[MAILBOX_VIEW].items():
        _, body = rows[MESSAGE_BODIES].get(key, (0, {"body": None}))
        stream = f"mailbox/{row['realm']}/{row['recipient']}"
        said = content_hash(row["sender"], row["recipient"], body["body"])
        found.mail[stream, row["message_id"]] = _mail(stream, said, {**row, **body})
    return found


def answered(name: str, url: str, settings: Settings, mailboxes: set[str]) -> Shown:
    """Return the state of jobs, tasks and these mailboxes that a gateway answers with."""
    token = settings.operator_token_file.read_text().strip()
    found = Shown(name)
    with httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=20, trust_env=False
    ) as client:
        jobs = client.get("/api/hub/jobs", params={"limit": 1000}).json()["jobs"]
        tasks = client.get("/api/hub/tasks", params={"limit": 1000}).json()["tasks"]
        found.states = {f"job/{job['job_id']}": job["status"] for job in jobs}
        found.states |= {f"task/{task['id']}": task["status"] for task in tasks}
        for stream in mailboxes:
            path = f"/api/hub/mailboxes/{stream.removeprefix('mailbox/')}"
            for one in client.get(path, params={"limit": 1000}).json()["messages"]:
                said = content_hash(one["sender"], one["recipient"], one["body"])
                found.mail[stream, one["message_id"]] = _mail(stream, said, one)
    return found


def _mail(stream: str, said: str, row: dict[str, Any]) -> Mail:
    """Return the message of a row of the view, or of a gateway's answer, with its body."""
    found = Mail(stream, row["message_id"], row["status"], said, row["kind"], row["body"] or "")
    return replace(
        found,
        attempts=row["attempts"],
        last_reason=row["last_reason"],
        request=row["request_id"] or "",
    )
