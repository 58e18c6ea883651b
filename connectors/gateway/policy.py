"""Who may do what at the HTTP door: one table, one function, deny by default.

A role has an action or it has not; `OWN` means: only on what is the caller's own (a session, a mailbox, a job
held by the session of the caller's name; to assign, a job that the caller registered). What the table does
not name is refused. When a rule changes, raise `schemas.refusal.POLICY_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from schemas.principals import DELEGATOR, OPERATOR, VIEWER, WORKER


class Action(StrEnum):
    """What a route does. Each route names exactly one."""

    JOB_REGISTER = "job.register"
    JOB_PICK = "job.pick"
    JOB_ASSIGN = "job.assign"
    JOB_CANCEL = "job.cancel"
    JOB_READ = "job.read"
    JOB_LIST = "job.list"
    EVENTS_READ = "events.read"
    VERDICTS_READ = "verdicts.read"
    BROKERS_READ = "brokers.read"
    SESSION_CREATE = "session.create"
    SESSION_STOP = "session.stop"
    SESSION_RESUME = "session.resume"
    SESSION_READ = "session.read"
    PRINCIPAL_ADD = "principal.add"
    PRINCIPAL_LIST = "principal.list"
    PRINCIPAL_REVOKE = "principal.revoke"
    MAILBOX_READ = "mailbox.read"


class Reach(StrEnum):
    """How far a right goes."""

    ALL = "all"
    OWN = "own"


_READING: Final = {
    Action.JOB_READ: Reach.ALL,
    Action.JOB_LIST: Reach.ALL,
    Action.EVENTS_READ: Reach.ALL,
    Action.SESSION_READ: Reach.ALL,
}

RIGHTS: Final[dict[str, dict[Action, Reach]]] = {
    OPERATOR: dict.fromkeys(Action, Reach.ALL),
    DELEGATOR: {
        **_READING,
        Action.JOB_REGISTER: Reach.ALL,
        Action.JOB_ASSIGN: Reach.OWN,
        Action.JOB_CANCEL: Reach.ALL,
        Action.SESSION_CREATE: Reach.ALL,
        Action.SESSION_STOP: Reach.ALL,
        Action.SESSION_RESUME: Reach.ALL,
        Action.MAILBOX_READ: Reach.OWN,
    },
    WORKER: {
        Action.JOB_PICK: Reach.OWN,
        Action.JOB_READ: Reach.OWN,
        Action.MAILBOX_READ: Reach.OWN,
    },
    VIEWER: dict(_READING),
}


@dataclass(frozen=True)
class Caller:
    """Who asks: the principal of a token that is valid now."""

    principal: str
    role: str


@dataclass(frozen=True)
class Decision:
    """The answer. `why` is for the caller and the ledger; it quotes nothing that the caller sent."""

    allowed: bool
    why: str = ""


def decide(caller: Caller, action: Action, owner: str | None = None) -> Decision:
    """Whether `caller` may do `action` on something that belongs to `owner` (None: to nobody known)."""
    reach = RIGHTS.get(caller.role, {}).get(action)
    if reach is Reach.ALL:
        return Decision(True)
    if reach is Reach.OWN:
        if owner is not None and owner == caller.principal:
            return Decision(True)
        return Decision(False, f"a {caller.role} may do {action} only on its own")
    return Decision(False, f"a {caller.role} may not do {action}")


def needs_owner(caller: Caller, action: Action) -> bool:
    """Whether the decision hangs on whose the thing is."""
    return RIGHTS.get(caller.role, {}).get(action) is Reach.OWN
