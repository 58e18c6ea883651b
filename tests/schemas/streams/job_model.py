"""The model of one job's stream: JE-02 to JE-08, JE-11, CM-02 and the rotation of its secret, written again
from the spec, plainly.

It shares no code with `schemas`. Where the fold keeps a bounded memory, the model keeps everything and works
out what the spec lets the fold remember.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from datetime import datetime
from typing import Any, NamedTuple

TERMINAL = ("completed", "error", "cancelled")
# Details that JE-04 calls unsafe; the generators of the tests draw from these and from harmless ones.
UNSAFE_DETAILS = ("wrote /etc/passwd", "set API_KEY=abc", "password: hunter2", "see ~/notes", r"C:\Users\x")


class Expected(NamedTuple):
    """The fold's expected answer to a record."""

    verdict: str
    reason: str | None = None
    late: bool = False
    status: str | None = None
    row: dict[str, Any] | None = None


class _Refused(Exception):
    """The first rule that a record breaks."""


def parse(value: bytes) -> Any:
    """The document in `value` by CM-02. Raises ValueError or RecursionError for what is malformed."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("key twice")
        return dict(pairs)

    def constant(name: str) -> None:
        raise ValueError(name)

    document = json.JSONDecoder(object_pairs_hook=unique, parse_constant=constant).decode(value.decode("utf-8"))
    _check(document, 0)
    return document


def _check(item: Any, depth: int) -> None:
    if isinstance(item, str):
        item.encode("utf-8")  # a lone surrogate raises
    elif isinstance(item, float):
        if item in (float("inf"), float("-inf")):
            raise ValueError("infinite")
    elif isinstance(item, int):
        if not -(2**63) <= item < 2**63:
            raise ValueError("beyond 64 bits")
    elif isinstance(item, dict | list):
        if depth == 64:
            raise ValueError("too deep")
        for part in [*item.keys(), *item.values()] if isinstance(item, dict) else item:
            _check(part, depth + 1)


def canonical(document: Any) -> bytes:
    """Canonical JSON by JE-05."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def content_of(event: dict[str, Any]) -> bytes:
    """Return the signed bytes: the event without its signature."""
    return canonical({**event, "data": {k: v for k, v in event["data"].items() if k != "hmac_sig"}})


def _printable(text: str, allowed: str = "") -> bool:
    return not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text if c not in allowed)


def _is_time(text: str) -> bool:
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{1,9})?Z", text, re.ASCII)
    if found is None:
        return False
    try:
        datetime.strptime(found[1], "%Y-%m-%dT%H:%M:%S")  # noqa: DTZ007  only its form counts
    except ValueError:
        return False
    return True


def _is_event(body: dict[str, Any]) -> bool:
    kinds = ("started", "progress", "permission_required", "completed", "error")
    detail, seq = body.get("detail"), body.get("seq")
    return (
        isinstance(seq, int)
        and not isinstance(seq, bool)
        and seq >= 1
        and body.get("event") in kinds
        and isinstance(body.get("timestamp"), str)
        and _is_time(body["timestamp"])
        and isinstance(detail, str)
        and len(detail) <= 500
        and _printable(detail)
        and isinstance(body.get("data"), dict)
    )


def _is_registration(body: dict[str, Any]) -> bool:
    allowed = {"schema_version", "job_id", "description", "session", "broker", "sealed_secret"}
    texts = isinstance(body.get("description"), str) and isinstance(body.get("sealed_secret"), str)
    return texts and set(body) <= allowed and _printable(body["description"], "\n\t")


def _is_cancellation(body: dict[str, Any]) -> bool:
    return set(body) <= {"schema_version", "job_id", "request_id", "reason"} and isinstance(
        body.get("request_id"), str
    )


def _is_rotation(body: dict[str, Any]) -> bool:
    overlap = body.get("overlap_ms")
    return (
        set(body) == {"schema_version", "job_id", "request_id", "sealed_secret", "overlap_ms"}
        and isinstance(body["request_id"], str)
        and isinstance(body["sealed_secret"], str)
        and type(overlap) is int
        and 0 <= overlap <= 30 * 24 * 3600 * 1000
    )


def _is_pick(body: dict[str, Any]) -> bool:
    session = body.get("session")
    return (
        set(body) == {"schema_version", "job_id", "session"}
        and isinstance(session, str)
        and len(session) <= 128
        and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", session) is not None
    )


_FORMS = {
    "job.event": _is_event,
    "job.registered": _is_registration,
    "job.picked": _is_pick,
    "job.cancelled": _is_cancellation,
    "job.secret_rotated": _is_rotation,
}


class JobModel:
    """One job's stream. `secrets` maps a sealed secret to what is in it; `kept` is the 256 of JE-07."""

    def __init__(self, job_id: str, secrets: dict[str, str], kept: int = 256) -> None:
        self.job_id = job_id
        self.secrets = secrets
        self.kept = kept
        self.registration: dict[str, Any] | None = None
        self.settled: dict[int, bytes] = {}
        self.cancel: tuple[str, dict[str, Any]] | None = None
        self.rotations: dict[str, dict[str, Any]] = {}
        # Sealed, each with the moment from which on it signs nothing more.
        self.good_until: dict[str, float] = {}
        self.secret = ""
        self.row: dict[str, Any] = {}

    def settle(
        self, record_type: str, ce_id: str, sender: str, value: bytes, time_us: int, cut: bool = False
    ) -> Expected:
        """Return the expected answer. `cut`: the door removed the body because it was over the limit."""
        try:
            return self._settle(record_type, ce_id, sender, value, time_us, cut)
        except _Refused as refusal:
            reason, *status = refusal.args
            return Expected("rejected", reason, status=status[0] if status else None)

    def _settle(
        self, record_type: str, ce_id: str, sender: str, value: bytes, time_us: int, cut: bool
    ) -> Expected:
        if cut:
            raise _Refused("too_large")
        body = self._body(record_type, value)
        if record_type == "job.registered":
            return self._register(body, sender, time_us)
        if self.registration is None:
            raise _Refused("unknown_stream")
        if record_type == "job.picked":
            return self._pick(body["session"], time_us)
        if record_type == "job.cancelled":
            return self._cancel(ce_id, body, time_us)
        if record_type == "job.secret_rotated":
            return self._rotate(ce_id, body, time_us)
        return self._event(body, ce_id, time_us)

    def _body(self, record_type: str, value: bytes) -> dict[str, Any]:
        try:
            body = parse(value)
        except (ValueError, RecursionError):
            raise _Refused("malformed") from None
        if not isinstance(body, dict):
            raise _Refused("malformed")
        version = body.get("schema_version")
        if isinstance(version, bool) or not isinstance(version, int) or body.get("job_id") != self.job_id:
            raise _Refused("malformed")
        if version != 1:
            raise _Refused("schema_version")
        if record_type not in _FORMS or not _FORMS[record_type](body):
            raise _Refused("malformed")
        return body

    def _register(self, body: dict[str, Any], sender: str, time_us: int) -> Expected:
        if self.registration is not None:
            if body == self.registration:
                return Expected("duplicate", status=self.row["status"])
            raise _Refused("seq_conflict", self.row["status"])
        self.registration = body
        self.secret, self.good_until = body["sealed_secret"], {body["sealed_secret"]: float("inf")}
        self.row = {
            "job_id": self.job_id,
            "status": "pending",
            "description": body["description"],
            "session_wanted": body.get("session"),
            "session": None,
            "registered_by": sender,
            "registered_at": time_us,
            "picked_at": None,
            "started_at": None,
            "ended_at": None,
            "ended_by": None,
            "last_seq": 0,
            "last_event": None,
            "last_detail": None,
            "events": 0,
            "notify": body.get("notify"),
            "secret_rotations": None,
            "old_secret_ends_at": None,
        }
        return self._accepted()

    def _pick(self, session: str, time_us: int) -> Expected:
        assert self.registration is not None
        status, wanted = self.row["status"], self.registration.get("session")
        if self.row["session"] == session:
            return Expected("duplicate", status=status)
        if status in TERMINAL:
            raise _Refused("after_terminal", status)
        if status == "running" or (wanted is not None and wanted != session):
            raise _Refused("illegal_transition", status)
        self.row.update(status="running", session=session, picked_at=time_us)
        return self._accepted()

    def _cancel(self, ce_id: str, body: dict[str, Any], time_us: int) -> Expected:
        status = self.row["status"]
        if self.cancel is not None and self.cancel[0] == ce_id:
            if self.cancel[1] == body:
                return Expected("duplicate", status=status)
            raise _Refused("seq_conflict", status)
        if status in TERMINAL:
            raise _Refused("after_terminal", status)
        self.cancel = (ce_id, body)
        self.row.update(status="cancelled", ended_at=time_us, ended_by=ce_id)
        return self._accepted()

    def _rotate(self, ce_id: str, body: dict[str, Any], time_us: int) -> Expected:
        status, new = self.row["status"], body["sealed_secret"]
        if new not in self.secrets:
            raise _Refused("bad_signature", status)
        if ce_id in self.rotations:
            if self.rotations[ce_id] == body:
                return Expected("duplicate", status=status)
            raise _Refused("seq_conflict", status)
        if status in TERMINAL:
            raise _Refused("after_terminal", status)
        if new == self.secret:
            raise _Refused("illegal_transition", status)
        self.rotations[ce_id] = body
        end = time_us + body["overlap_ms"] * 1000
        self.good_until = {self.secret: end, new: float("inf")}
        self.secret = new
        self.row["secret_rotations"] = (self.row["secret_rotations"] or 0) + 1
        self.row["old_secret_ends_at"] = end
        return self._accepted()

    def _event(self, event: dict[str, Any], ce_id: str, time_us: int) -> Expected:
        status, seq, content = self.row["status"], event["seq"], content_of(event)
        assert self.registration is not None
        good = (self.secrets[sealed] for sealed, end in self.good_until.items() if time_us < end)
        fitting = {hmac.new(one.encode("utf-8"), content, hashlib.sha256).hexdigest() for one in good}
        if event["data"].get("hmac_sig") not in fitting:
            raise _Refused("bad_signature", status)
        if "auth_token" in event["data"]:
            raise _Refused("secret_in_event", status)
        known = self._what_is_known_of(seq)
        if known == "nothing can be told":
            raise _Refused("too_late", status)
        if known == "settled" or known == content:
            return Expected("duplicate", status=status)
        if known is not None:
            raise _Refused("seq_conflict", status)
        if status in TERMINAL:
            raise _Refused("after_terminal", status)
        if event["event"] == "started" and seq != 1:
            raise _Refused("illegal_transition", status)
        return self._accept_event(event, content, ce_id, time_us)

    def _what_is_known_of(self, seq: int) -> bytes | str | None:
        newest = sorted(self.settled)[-self.kept :]
        floor = 0
        while floor + 1 in self.settled:
            floor += 1
        if seq in newest:
            return self.settled[seq]
        if seq <= floor:
            return "settled"
        return "nothing can be told" if len(newest) == self.kept and seq < newest[0] else None

    def _accept_event(self, event: dict[str, Any], content: bytes, ce_id: str, time_us: int) -> Expected:
        late = any(seq > event["seq"] for seq in self.settled)
        self.settled[event["seq"]] = content
        kind, detail = event["event"], event["detail"]
        self.row["events"] += 1
        self.row["last_seq"] = max(self.settled)
        self.row["status"] = kind if kind in TERMINAL else "running"
        if self.row["started_at"] is None:
            self.row["started_at"] = time_us
        if kind in TERMINAL:
            self.row.update(ended_at=time_us, ended_by=ce_id)
        if not late:
            self.row["last_event"] = kind
            self.row["last_detail"] = "[masked]" if detail in UNSAFE_DETAILS else detail
        return self._accepted(late)

    def _accepted(self, late: bool = False) -> Expected:
        return Expected("accepted", None, late, self.row["status"], dict(self.row))
