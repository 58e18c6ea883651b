"""The access policy of the HTTP gateway: roles, their rights, and the capabilities of a task's token.

Access is denied unless the table `RIGHTS` grants it. A principal may change and end the things that it made;
the operator may change and end everything.

`RIGHTS` gives a role an action for everything (`ALL`) or for the caller's own things (`OWN`). A caller owns:

- as a delegator: the jobs that it registered, the sessions that it created, the tasks that it submitted, and
  the tokens of these tasks;
- as a worker: the session of its name and the job that this session holds;
- as an agent: the task whose token it presents;
- in every role: the mailbox of its name, the subscriptions of this mailbox to topics, its webhook, and the
  schedules that it set.

A thing that does not exist has no owner. The capabilities of a task's token can restrict an agent further, see
`has_capability`. Raise `schemas.streams.refused.refusal.POLICY_VERSION` whenever a rule changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from connectors.hub.serving.answers import DOOR
from schemas.streams.principal.principals import AGENT, DELEGATOR, OPERATOR, VIEWER, WORKER


class Action(StrEnum):
    """The action of a route. Each route names exactly one."""

    JOB_REGISTER = "job.register"
    JOB_PICK = "job.pick"
    JOB_ASSIGN = "job.assign"
    JOB_CANCEL = "job.cancel"
    JOB_ROTATE = "job.rotate"
    JOB_REPORT = "job.report"
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
    MESSAGE_BROADCAST = "message.broadcast"
    MESSAGE_DRAIN = "message.drain"
    MESSAGE_MARK = "message.mark"
    MESSAGE_REPLAY = "message.replay"
    TOPIC_PUBLISH = "topic.publish"
    TOPIC_SUBSCRIBE = "topic.subscribe"
    TOPIC_READ = "topic.read"
    SCHEDULE_SET = "schedule.set"
    SCHEDULE_REMOVE = "schedule.remove"
    SCHEDULE_READ = "schedule.read"
    SCHEDULE_LIST = "schedule.list"
    WEBHOOK_SET = "webhook.set"
    WEBHOOK_READ = "webhook.read"
    WEBHOOK_LIST = "webhook.list"
    AUDIT_READ = "audit.read"
    AGENT_READ = "agent.read"
    TASK_SUBMIT = "task.submit"
    TASK_READ = "task.read"
    TASK_CANCEL = "task.cancel"
    TASK_END = "task.end"
    PARTICIPANT_ADD = "participant.add"
    PARTICIPANT_STOP = "participant.stop"
    MAILBOX_CLEAR = "mailbox.clear"
    LIMITS_READ = "limits.read"
    LIMITS_SET = "limits.set"
    PUMP_RUN = "pump.run"
    THREAD_READ = "thread.read"
    LISTENER_READ = "listener.read"
    TOKEN_LIST = "token.list"  # noqa: S105  an action's name
    TOKEN_REVOKE = "token.revoke"  # noqa: S105


class Reach(StrEnum):
    """The things that a right covers: all of them, or those that the caller owns."""

    ALL = "all"
    OWN = "own"


def _rights(every: Iterable[Action] = (), own: Iterable[Action] = ()) -> dict[Action, Reach]:
    """Return rights to some actions for everything, and to others for the caller's own things."""
    return dict.fromkeys(every, Reach.ALL) | dict.fromkeys(own, Reach.OWN)


_READING: Final = _rights(
    every=(
        *(Action.JOB_READ, Action.JOB_LIST, Action.EVENTS_READ, Action.SESSION_READ, Action.AGENT_READ),
        *(Action.TASK_READ, Action.TOKEN_LIST, Action.AUDIT_READ, Action.TOPIC_READ),
    )
)
# The sender and the mailbox of most of these actions are always the caller's own, so they need no limit. The
# mailbox that is subscribed to a topic can be named. A free name of a schedule belongs to the caller, and the
# lists have the caller's own schedules and webhooks alone. A webhook belongs to the owner of its mailbox. That
# of a topic has no owner, so it is the operator's.
_MESSAGES: Final = _rights(
    every=(
        *(Action.MESSAGE_SEND, Action.MESSAGE_BROADCAST, Action.MESSAGE_DRAIN, Action.MESSAGE_MARK),
        *(Action.TOPIC_PUBLISH, Action.TOPIC_READ, Action.SCHEDULE_LIST, Action.WEBHOOK_LIST),
    ),
    own=(
        *(Action.TOPIC_SUBSCRIBE, Action.SCHEDULE_SET, Action.SCHEDULE_REMOVE, Action.SCHEDULE_READ),
        *(Action.WEBHOOK_READ, Action.MAILBOX_READ, Action.MESSAGE_REPLAY),
    ),
)

RIGHTS: Final[dict[str, dict[Action, Reach]]] = {
    OPERATOR: _rights(every=Action),
    DELEGATOR: {
        **_READING,
        **_MESSAGES,
        **_rights(
            every=(Action.JOB_REGISTER, Action.SESSION_CREATE, Action.TASK_SUBMIT),
            own=(
                *(Action.JOB_ASSIGN, Action.JOB_CANCEL, Action.JOB_ROTATE, Action.JOB_REPORT),
                *(Action.SESSION_STOP, Action.SESSION_RESUME, Action.TASK_CANCEL, Action.TASK_END),
                *(Action.TOKEN_REVOKE, Action.WEBHOOK_SET),
            ),
        ),
    },
    WORKER: {
        **_MESSAGES,
        **_rights(
            every=(Action.AGENT_READ,),
            own=(Action.JOB_PICK, Action.JOB_REPORT, Action.JOB_READ, Action.WEBHOOK_SET),
        ),
    },
    # An agent sets no webhook, because it would outlive the token of the agent's task.
    AGENT: {**_MESSAGES, **_rights(every=(Action.AGENT_READ,), own=(Action.TASK_READ, Action.TASK_END))},
    VIEWER: _READING,
}


def roles_with(action: Action) -> dict[str, Reach]:
    """Return the roles that may perform an action, each with the reach of its right.

    `Reach.ALL` means a right for everything, `Reach.OWN` only for things that the caller owns.
    """
    return {role: rights[action] for role, rights in RIGHTS.items() if action in rights}


# The actions that a token's capabilities can restrict. An agent keeps its mailbox and the end of its own task.
RESTRICTED_BY_CAPABILITIES: Final = frozenset(
    {
        Action.MESSAGE_SEND,
        Action.MESSAGE_BROADCAST,
        Action.TOPIC_PUBLISH,
        Action.SCHEDULE_SET,
        Action.TASK_SUBMIT,
    }
)
# An agent that may send may publish, so it needs no further capability.
_ALSO_BY: Final = {Action.TOPIC_PUBLISH: Action.MESSAGE_SEND}
_CAPABILITY_FAMILIES: Final = ("message.", "task.")


@dataclass(frozen=True)
class Caller:
    """The authenticated sender of a request.

    Attributes:
        task_id: The task whose token an agent presented; None for every other principal.
        token_id: The id of that token.
        capabilities: The capabilities of that token; empty for every other principal.
    """

    principal: str
    role: str
    task_id: str | None = None
    token_id: str | None = None
    capabilities: tuple[str, ...] = ()

    @property
    def requester(self) -> str:
        """The namespace of the caller's idempotency keys: its name, and for an agent also its task's id."""
        return self.principal if self.task_id is None else f"{self.principal}/{self.task_id}"

    def owns(self, owner: str | None) -> bool:
        """Return whether a thing that belongs to `owner` belongs to this caller.

        Args:
            owner: The name of a principal, for a mailbox or a worker's session. `<door>/<principal>`, as the
                registry rows name the creator of a thing. Or the result of `owner_of_task`. A name contains no
                slash, so the three forms cannot be confused. None means no known owner; the result is then
                False.
        """
        # An agent is not a principal: it does not own the jobs and tasks of a principal that has its name.
        made_by_token = f"{DOOR}/{self.principal}" if self.task_id is None else owner_of_task(self.task_id)
        return owner is not None and owner in (self.principal, made_by_token)


def owner_of_task(task_id: str | None) -> str | None:
    """Return `task/<task id>`, the owner of a task from the point of view of the agent that runs for it.

    It stands for the holder of the task's token, and is an argument for `Caller.owns`. If `task_id` is None,
    the result is None.
    """
    return None if task_id is None else f"task/{task_id}"


@dataclass(frozen=True)
class Decision:
    """The result of an access check: whether the action is allowed and, if not, why.

    Attributes:
        why: The reason of a refusal, for the caller and the ledger; "" if the action is allowed. It quotes
            nothing that the caller sent.
    """

    allowed: bool
    why: str = ""


def decide(caller: Caller, action: Action, owner: str | None = None) -> Decision:
    """Decide by role, ownership and token capabilities whether a caller may perform an action.

    The function only returns the decision, with the reason of a refusal. The caller of this function records
    the refusal.

    Args:
        caller: The authenticated sender of the request.
        action: The action of the route.
        owner: The owner of the thing that the request is about, in a form of `Caller.owns`; None for no known
            owner. It matters only for rights that cover the caller's own things.
    """
    reach = RIGHTS.get(caller.role, {}).get(action)
    if reach is None:
        return Decision(False, f"a {caller.role} may not do {action}")
    if reach is Reach.OWN and not caller.owns(owner):
        return Decision(False, f"a {caller.role} may do {action} only on its own")
    if not has_capability(caller, action):
        return Decision(False, f"the capabilities of the task's token do not include {action}")
    return Decision(True)


def has_capability(caller: Caller, action: Action) -> bool:
    """Return whether the capabilities of the caller's token permit an action.

    Capabilities restrict a right that the role has; they never grant one. The rule:

    - Only sending, publishing, broadcasting, setting schedules and submitting tasks
      (`RESTRICTED_BY_CAPABILITIES`) can be restricted. Every other action is permitted.
    - A list without any name that starts with `message.` or `task.` restricts nothing.
    - Any other list permits those restricted actions that it names, such as `message.send`. This one also
      permits publishing.
    """
    if action not in RESTRICTED_BY_CAPABILITIES:
        return True
    is_restricted = any(name.startswith(_CAPABILITY_FAMILIES) for name in caller.capabilities)
    named = {action, _ALSO_BY.get(action, action)}
    return not is_restricted or not named.isdisjoint(caller.capabilities)


def needs_owner(caller: Caller, action: Action) -> bool:
    """Return whether the caller's role may perform the action only on its own things.

    If so, `decide` needs the owner of the thing. False also means that the role has no right to the action.
    """
    return RIGHTS.get(caller.role, {}).get(action) is Reach.OWN
