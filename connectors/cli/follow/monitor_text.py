"""What `trunkline monitor` says of a change and of a drift, in words; as lines and as table alike."""

from __future__ import annotations

from connectors.gateway_client.registry_follower import RowChange
from connectors.processes.registry_drift import Drift
from schemas.fold.life_cycles import JOB_TERMINAL, TERMINATED
from schemas.wire.ids import JOB


def change_text(change: RowChange) -> str:
    """A change in words, not escaped."""
    row, before = change.row, change.before
    status = row["status"]
    if before is not None and before["status"] != status:
        status = f"{before['status']} -> {status}"
    if change.kind == JOB:
        told = [f"job      {change.name}  {status}"]
        if row["session"]:
            told.append(f"in session {row['session']}")
        if row["last_event"] and row["status"] not in JOB_TERMINAL | {"pending"}:
            told.append(f"{row['last_seq']} {row['last_event']}: {row['last_detail']}")
        elif row["last_detail"]:
            told.append(row["last_detail"])
    else:
        told = [f"session  {change.name}  {status}"]
        if row["job_id"]:
            told.append(f"has job {row['job_id']}")
        if row["reason"]:
            told.append(row["reason"])
        if row["status"] == TERMINATED and before is not None and (change.by or "").startswith("reactor/"):
            told.append("closed by the reactor")
    return "  ".join(told)


def drift_text(drift: Drift, outcome: str | None = None) -> str:
    """A drift in words, not escaped."""
    job = "" if drift.job_id is None else f", job {drift.job_id}"
    return f"session {drift.session}{job}: {drift.why}" + ("" if outcome is None else f"; {outcome}")
