"""The model of one task's stream: HH-02 to HH-04 written again from the spec, slowly and plainly.

It shares no code with `schemas`, and takes bodies that are right in themselves.
"""

from __future__ import annotations

from typing import Any

ENDS = {"task.completed": "completed", "task.failed": "failed", "task.cancelled": "cancelled"}
Answer = tuple[str, str | None]
ACCEPTED: Answer = ("accepted", None)
DUPLICATE: Answer = ("duplicate", None)


class TaskModel:
    """One task: which requests were accepted, its state, and what became of its token."""

    def __init__(self) -> None:
        self.status: str | None = None
        self.token: str | None = None
        self._token_id = ""
        self._said: tuple[str, str] | None = None
        self._requests: dict[str, dict[str, Any]] = {}

    def settle(self, kind: str, ce_id: str, body: dict[str, Any]) -> Answer:
        """Verdict and reason of a record."""
        answer = self._settle(kind, ce_id, body)
        if answer == ACCEPTED:
            self._requests[ce_id] = body
        return answer

    def _settle(self, kind: str, ce_id: str, body: dict[str, Any]) -> Answer:
        if self.status is None and kind not in ("task.created", "task.started"):
            return "rejected", "unknown_stream"
        if kind == "token.revoked" and (self.token is None or body["token_id"] != self._token_id):
            return "rejected", "unknown_stream"
        if ce_id in self._requests:
            return DUPLICATE if self._requests[ce_id] == body else ("rejected", "seq_conflict")
        if kind == "task.created":
            return self._create(body)
        if kind == "task.started":
            return self._start(body)
        if kind == "token.revoked":
            return self._revoke()
        return self._end(kind)

    def _create(self, body: dict[str, Any]) -> Answer:
        if self.status is not None:
            return "rejected", "seq_conflict"
        self.status, self._said = "pending", (body["description"], body["agent_name"])
        return ACCEPTED

    def _start(self, body: dict[str, Any]) -> Answer:
        waits_for_this = self.status == "pending" and self._said == (body["description"], body["agent_name"])
        if self.status is not None and not waits_for_this:
            return "rejected", "seq_conflict"
        self.status, self.token, self._token_id = "running", "active", body["token_sha256"][:12]
        return ACCEPTED

    def _revoke(self) -> Answer:
        if self.token == "revoked":
            return DUPLICATE
        self.token = "revoked"
        return ACCEPTED

    def _end(self, kind: str) -> Answer:
        if self.status not in ("pending", "running"):
            return "rejected", "after_terminal"
        if self.status == "pending" and kind != "task.cancelled":
            return "rejected", "illegal_transition"
        self.status = ENDS[kind]
        if self.token is not None:
            self.token = "revoked"
        return ACCEPTED
