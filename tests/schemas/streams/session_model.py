"""The model of one session's stream: JE-14 written again from the spec, slowly and plainly.

It shares no code with `schemas`, and takes bodies that are right in themselves. `kept` is how many requests
the fold remembers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# (state, command) -> state after it. No other command is allowed.
COMMANDS = {
    ("running", "stop"): "stopped",
    ("running", "hard"): "terminated",
    ("running", "soft"): "archived",
    ("stopped", "hard"): "terminated",
    ("stopped", "soft"): "archived",
    ("stopped", "resume"): "running",
    ("archived", "hard"): "terminated",
    ("archived", "resume"): "running",
}


class Said(NamedTuple):
    """The fold's expected answer to a record."""

    verdict: str
    reason: str | None = None
    status: str | None = None
    row: dict[str, Any] | None = None


class SessionModel:
    """One session. All requests that were accepted are kept, and asked as far back as the fold may."""

    def __init__(self, name: str, kept: int = 256) -> None:
        self.name = name
        self.kept = kept
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.row: dict[str, Any] = {}

    def settle(self, kind: str, ce_id: str, sender: str, body: dict[str, Any], time_us: int) -> Said:
        """Return the expected answer to a record of type `session.<kind>`."""
        if not self.row and kind not in ("created", "job_assigned"):
            return Said("rejected", "unknown_stream")
        for known_id, known_body in self.requests[-self.kept :]:
            if known_id == ce_id:
                same = known_body == body
                return Said("duplicate" if same else "rejected", None if same else "seq_conflict", self.status)
        if self.row:
            reason = self._change(kind, body, time_us)
            if reason is not None:
                return Said("rejected", reason, self.status)
        else:
            self._begin(kind, sender, body, time_us)
        self.requests.append((ce_id, body))
        return Said("accepted", None, self.status, dict(self.row))

    @property
    def status(self) -> str:
        """The state now."""
        return str(self.row["status"])

    def _begin(self, kind: str, sender: str, body: dict[str, Any], time_us: int) -> None:
        self.row = {
            "session": self.name,
            "status": "running",
            "description": body.get("description", ""),
            "host": body.get("host"),
            "handle": body.get("handle"),
            "for_job": body.get("for_job"),
            "job_id": body["job_id"] if kind == "job_assigned" else None,
            "jobs_ended": 0,
            "created_by": sender,
            "created_at": time_us,
            "stopped_at": None,
            "reason": None,
            "capture_id": None,
        }

    def _change(self, kind: str, body: dict[str, Any], time_us: int) -> str | None:
        if kind == "created":
            return "seq_conflict"
        if kind == "job_ended":
            self._end_job(body, time_us)
            return None
        if self.status == "terminated":
            return "after_terminal"
        if kind == "job_assigned":
            if self.status != "running":
                return "illegal_transition"
            self.row["job_id"] = body["job_id"]
            return None
        command = body.get("mode", "stop") if kind == "stopped" else "resume"
        after = COMMANDS.get((self.status, command))
        if after is None:
            return "illegal_transition"
        self.row["status"] = after
        if kind == "stopped":
            reason = body.get("reason") or None
            self.row.update(stopped_at=time_us, reason=reason, capture_id=body.get("capture_id"))
        else:
            self.row.update(stopped_at=None, reason=None)
            self.row.update({k: body[k] for k in ("host", "handle") if body.get(k) is not None})
        return None

    def _end_job(self, body: dict[str, Any], time_us: int) -> None:
        self.row["jobs_ended"] += 1
        if self.row["job_id"] == body["job_id"]:
            self.row["job_id"] = None
        if self.row["for_job"] == body["job_id"] and self.status in ("running", "stopped"):
            self.row.update(status="terminated", stopped_at=time_us, reason=f"job {body['outcome']}")
