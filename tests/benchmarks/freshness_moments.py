"""The moments at which what was sent could be read: in the ledger, and in the views."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet

from schemas.settings.settings import Settings
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from schemas.tables.ledger import LEDGER

Sent = dict[str, float]
"""CloudEvents id to the moment of its first publish (seconds since 1970)."""


def commits(table: str) -> Iterator[tuple[float, list[Path]]]:
    """Moment and added files of each commit of a local table, oldest first."""
    for log in sorted(Path(table, "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        added = [a["add"]["path"] for a in actions if "add" in a and a["add"]["dataChange"]]
        yield log.stat().st_mtime, [Path(table, path) for path in added if Path(table, path).exists()]


def ledger_moments(settings: Settings) -> tuple[Sent, dict[str, tuple[str, int]], set[str]]:
    """When each accepted event was readable in the ledger, and its job and offset; and all events, however they
    were settled.
    """
    moments: Sent = {}
    settled: set[str] = set()
    places: dict[str, tuple[str, int]] = {}
    columns = ["ce_id", "stream_id", "offset", "type", "verdict"]
    for moment, files in commits(settings.table_path(LEDGER)):
        for file in files:
            for row in parquet.read_table(file, columns=columns, partitioning=None).to_pylist():
                if row["type"] != "job.event":
                    continue
                settled.add(row["ce_id"])
                if row["verdict"] == "accepted":
                    moments[row["ce_id"]] = moment
                    places[row["ce_id"]] = (row["stream_id"], row["offset"])
    return moments, places, settled


def view_moments(settings: Settings, places: dict[str, tuple[str, int]]) -> Sent:
    """When the registry's row of its job first showed each event."""
    shown: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for moment, files in commits(settings.table_path(REGISTRY_JOBS)):
        for file in files:
            rows = parquet.read_table(file, columns=["job_id", "last_offset"], partitioning=None)
            for row in rows.to_pylist():
                shown[row["job_id"]].append((moment, row["last_offset"]))
    found: Sent = {}
    for ce_id, (job_id, offset) in places.items():
        moments = [moment for moment, last in shown[job_id] if last >= offset]
        if moments:
            found[ce_id] = min(moments)
    return found


def mailbox_moments(settings: Settings) -> Sent:
    """When the mailbox first showed each message."""
    found: Sent = {}
    for moment, files in commits(settings.table_path(MAILBOX_VIEW)):
        for file in files:
            for message_id in parquet.read_table(file, columns=["message_id"], partitioning=None)["message_id"]:
                found.setdefault(message_id.as_py(), moment)
    return found


def within(sent: Sent, after: float, until: float) -> Sent:
    """Return the events that were sent from `after` to `until`."""
    return {ce_id: moment for ce_id, moment in sent.items() if after <= moment <= until}


def ages(sent: Sent, seen: Sent, where: str) -> list[float]:
    """Return the seconds from publish to `seen`, sorted.

    Raises:
        SystemExit: Nothing was seen; `where` is the place for the message.
    """
    found = sorted(seen[ce_id] - moment for ce_id, moment in sent.items() if ce_id in seen)
    if not found:
        raise SystemExit(f"freshness: none of {len(sent)} arrived in the {where}")
    return found
