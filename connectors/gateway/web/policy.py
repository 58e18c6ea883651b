"""Who may do what at the HTTP door: one table, one function, deny by default.

The rule: a thing is changed and ended by the principal that made it, and by the operator.

A role has an action or it has not; `OWN` limits it to what is the caller's own:

- a delegator: jobs that it registered, sessions that it created, tasks that it submitted, and their tokens;
- a worker: the session of its name, and the job that this session holds;
- an agent: the task whose token it has;
- all of them: the mailbox of their name.

What does not exist belongs to nobody. What the table does not name is refused. When a rule changes, raise
`schemas.wire.refusal.POLICY_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from connectors.gateway.web.refusals import DOOR
from schemas.streams.principal.principals import AGENT, DELEGATOR, OPERATOR, VIEWER, WORKER


class Action(StrEnum):
    """What a route does. Each route names exactly one."""

    JOB_REGISTER = "job.register"
    JOB_PICK = "job.pick"
    JOB_ASSIGN = "job.assign"
    JOB_CANCEL = "job.cancel"
    JOB_ROTATE = "job.rotate"
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
    MESSAGE_SEND = "message.send"
    MESSAGE_DRAIN = "message.drain"
    MESSAGE_MARK = "message.mark"
    AUDIT_READ = "audit.read"
    AGENT_READ = "agent.read"
    TASK_SUBMIT = "task.submit"
    TASK_READ = "task.read"
    TASK_CANCEL = "task.cancel"
    TASK_END = "task.end"
    PARTICIPANT_ADD = "participant.add"
    PARTICIPANT_STOP = "participant.stop"
    MAILBOX_CLEAR = "mailbox.clear"
    PUMP_RUN = "pump.run"
    THREAD_READ = "thread.read"
    LISTENER_READ = "listener.read"
    TOKEN_LIST = "token.list"  # noqa: S105  an action's name
    TOKEN_REVOKE = "token.revoke"  # noqa: S105


class Reach(StrEnum):
    """How far a right goes."""

    ALL = "all"
    OWN = "own"


_READING: Final = {
    Action.JOB_READ: Reach.ALL,
    Action.JOB_LIST: Reach.ALL,
    Action.EVENTS_READ: Reach.ALL,
    Action.SESSION_READ: Reach.ALL,
    Action.AGENT_READ: Reach.ALL,
    Action.TASK_READ: Reach.ALL,
    Action.TOKEN_LIST: Reach.ALL,
    Action.AUDIT_READ: Reach.ALL,
}
# What everybody with a mailbox may do with it: the sender and the mailbox are the caller's own by themselves.
_MESSAGES: Final = {
    Action.MESSAGE_SEND: Reach.ALL,
    Action.MESSAGE_DRAIN: Reach.ALL,
    Action.MESSAGE_MARK: Reach.ALL,
}

RIGHTS: Final[dict[str, dict[Action, Reach]]] = {
    OPERATOR: dict.fromkeys(Action, Reach.ALL),
    DELEGATOR: {
        **_READING,
        Action.JOB_REGISTER: Reach.ALL,
        Action.JOB_ASSIGN: Reach.OWN,
        Action.JOB_CANCEL: Reach.OWN,
        Action.JOB_ROTATE: Reach.OWN,
        Action.SESSION_CREATE: Reach.ALL,
        Action.SESSION_STOP: Reach.OWN,
        Action.SESSION_RESUME: Reach.OWN,
        Action.MAILBOX_READ: Reach.OWN,
        Action.TASK_SUBMIT: Reach.ALL,
        Action.TASK_CANCEL: Reach.OWN,
        Action.TASK_END: Reach.OWN,
        Action.TOKEN_REVOKE: Reach.OWN,
        **_MESSAGES,
    },
    WORKER: {
        Action.JOB_PICK: Reach.OWN,
        Action.JOB_READ: Reach.OWN,
        Action.MAILBOX_READ: Reach.OWN,
        **_MESSAGES,
    },
    AGENT: {
        Action.MAILBOX_READ: Reach.OWN,
        Action.AGENT_READ: Reach.ALL,
        Action.TASK_READ: Reach.OWN,
        Action.TASK_END: Reach.OWN,
        **_MESSAGES,
    },
    VIEWER: dict(_READING),
}


@dataclass(frozen=True)
class Caller:
    """Who asks: the principal of a token that is valid now. An agent comes with the token of its task."""

    principal: str
    role: str
    task_id: str | None = None
    token_id: str | None = None
    capabilities: tuple[str, ...] = ()

    @property
    def requester(self) -> str:
        """Whose the ids of requests are: two tasks of one agent know nothing of each other's."""
        return self.principal if self.task_id is None else f"{self.principal}/{self.task_id}"

    def owns(self, owner: str | None) -> bool:
        """Return whether what belongs to `owner` is the caller's own.

        `owner` is a principal's name (of its mailbox, of a session's worker), `<door>/<principal>` as the rows
        of the registries name a creator, or `owner_of_task`. A name holds no slash: none is taken for another.
        """
        # An agent is no principal: the jobs and tasks of a principal with the agent's name are not its own.
        made_by_token = f"{DOOR}/{self.principal}" if self.task_id is None else owner_of_task(self.task_id)
        return owner is not None and owner in (self.principal, made_by_token)


def owner_of_task(task_id: str | None) -> str | None:
    """Return the owner of a task as an agent sees it: the holder of the task's token."""
    return None if task_id is None else f"task/{task_id}"


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
        if caller.owns(owner):
            return Decision(True)
        return Decision(False, f"a {caller.role} may do {action} only on its own")
    return Decision(False, f"a {caller.role} may not do {action}")


def needs_owner(caller: Caller, action: Action) -> bool:
    """Whether the decision hangs on whose the thing is."""
    return RIGHTS.get(caller.role, {}).get(action) is Reach.OWN
