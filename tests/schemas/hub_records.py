"""Records of tasks, agents and containers as tests make them: one good body for each record type."""

from __future__ import annotations

from typing import Any, Final

from schemas.entries import Entries
from schemas.fold import settle
from schemas.settled import Settled
from tests.schemas.job_records import KEYRING, document_record

TASK_KEY: Final = b"task/t1"
AGENT_KEY: Final = b"agent/coder"
CONTAINER_KEY: Final = b"container/c1"
TASK_TOKEN_SHA256: Final = "fedcba9876543210" * 4
TASK_TOKEN_ID: Final = "fedcba987654"
HOUR_MS: Final = 3_600_000


def asked(request_id: str = "q1", **changed: Any) -> dict[str, Any]:
    """The body of a request about a task, with fields changed."""
    return {"schema_version": 1, "task_id": "t1", "request_id": request_id, **changed}


def task_creation(request_id: str = "q1", **changed: Any) -> dict[str, Any]:
    """The body of a task's creation, with fields changed."""
    return asked(request_id, **{"description": "count the stars", "agent_name": "coder", **changed})


def task_start(request_id: str = "q2", **changed: Any) -> dict[str, Any]:
    """The body of a task's start, with fields changed."""
    started = {"capabilities": ["read", "write"], "token_sha256": TASK_TOKEN_SHA256, "expiry_ms": HOUR_MS}
    return task_creation(request_id, **{**started, **changed})


def token_revocation(request_id: str = "q3", **changed: Any) -> dict[str, Any]:
    """The body of a token's revocation, with fields changed."""
    return asked(request_id, **{"token_id": TASK_TOKEN_ID, **changed})


def definition(**changed: Any) -> dict[str, Any]:
    """The body of an agent's definition, with fields changed."""
    body = {
        "schema_version": 1,
        "agent_name": "coder",
        "image": "python:3",
        "description": "writes programs",
        "capabilities": ["read", "write"],
        "hardened": True,
    }
    return {**body, **changed}


def container_change(state: str = "provisioning", **changed: Any) -> dict[str, Any]:
    """The body of a container's change, with fields changed."""
    body = {
        "schema_version": 1,
        "container": "c1",
        "state": state,
        "task_id": "t1",
        "agent_name": "coder",
        "backend": "process",
        "launcher": "gateway1",
    }
    return {**body, **changed}


# Record type -> the key of its stream and a good body, in an order in which they can happen.
HUB_GOOD: Final[dict[str, tuple[bytes, dict[str, Any]]]] = {
    "task.created": (TASK_KEY, task_creation()),
    "task.started": (TASK_KEY, task_start()),
    "token.revoked": (TASK_KEY, token_revocation()),
    "task.completed": (TASK_KEY, asked("q4", result="7 stars")),
    "task.failed": (TASK_KEY, asked("q5", error="no telescope")),
    "task.cancelled": (TASK_KEY, asked("q6")),
    "agent.defined": (AGENT_KEY, definition()),
    "agent.removed": (AGENT_KEY, {"schema_version": 1, "agent_name": "coder"}),
    "container.changed": (CONTAINER_KEY, container_change()),
}
# What makes each of these streams known.
HUB_FIRST: Final = ("task.started", "agent.defined", "container.changed")


def hub_told(entries: Entries, record_type: str, body: dict[str, Any], **changed: Any) -> Settled:
    """What the fold says of one record of these streams; its id is the request's unless told otherwise."""
    ce_id = changed.pop("ce_id", None) or f"{record_type} {body.get('request_id', '')}"
    key = changed.pop("key", None) or HUB_GOOD[record_type][0]
    return settle(document_record(body, record_type, key=key, ce_id=ce_id, **changed), entries, KEYRING)
