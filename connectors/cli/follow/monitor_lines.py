"""Output of `trunkline monitor` as lines of text or JSON, and the texts of changes and drifts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from connectors.gateway_client.registry_follower import RegistryFollower, RowChange
from connectors.ledger_files.ledger_lines import iso_time
from connectors.processes.registry_drift import Drift
from connectors.terminal.terminal_text import escaped
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.streams.session.session_registry import TERMINATED
from schemas.wire.ids import JOB


def change_text(change: RowChange) -> str:
    """Return a change in words, not escaped."""
    row, before = change.row, change.before
    status = row["status"]
    if before is not None and before["status"] != status:
        status = f"{before['status']} -> {status}"
    if change.kind == JOB:
        parts = [f"job      {change.name}  {status}"]
        if row["session"]:
            parts.append(f"in session {row['session']}")
        if row["last_event"] and row["status"] not in JOB_TERMINAL | {"pending"}:
            parts.append(f"{row['last_seq']} {row['last_event']}: {row['last_detail']}")
        elif row["last_detail"]:
            parts.append(row["last_detail"])
    else:
        parts = [f"session  {change.name}  {status}"]
        if row["job_id"]:
            parts.append(f"has job {row['job_id']}")
        if row["reason"]:
            parts.append(row["reason"])
        if row["status"] == TERMINATED and before is not None and (change.by or "").startswith("reactor/"):
            parts.append("closed by the reactor")
    return "  ".join(parts)


def drift_text(drift: Drift, outcome: str | None = None) -> str:
    """Return a drift in words, not escaped."""
    job = "" if drift.job_id is None else f", job {drift.job_id}"
    return f"session {drift.session}{job}: {drift.why}" + ("" if outcome is None else f"; {outcome}")


class PlainLines:
    """One line for each change of state, each event of a job, each drift. Other forms of output override it."""

    def stands(self, row: RowChange) -> None:
        """Show a row that exists when the command starts."""
        self.changed(row)

    def changed(self, change: RowChange) -> None:
        """Show that a row has changed."""
        print(f"{_now()}  {escaped(change_text(change))}", flush=True)

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Show a drift. `outcome` says what was done about it."""
        print(f"{_now()}  drift    {escaped(drift_text(drift, outcome))}", flush=True)

    def redraw(self, registries: RegistryFollower, drifts: list[Drift]) -> None:
        """Show the current state, after each look at it. Lines do nothing here."""


class JsonLines(PlainLines):
    """The same as JSON, one object a line."""

    def changed(self, change: RowChange) -> None:
        """Print the change."""
        before = None if change.before is None else change.before["status"]
        _print_json(kind=change.kind, name=change.name, status_before=before, by=change.by, row=change.row)

    def drifted(self, drift: Drift, outcome: str | None) -> None:
        """Print the drift."""
        found = {"drift": drift.kind, "session": drift.session, "job_id": drift.job_id, "why": drift.why}
        _print_json(kind="drift", **found, outcome=outcome)


def _print_json(**found: Any) -> None:
    print(json.dumps({"at": _now(), **found}, separators=(",", ":")), flush=True)


def _now() -> str:
    return iso_time(datetime.now(UTC), "milliseconds")
