"""The boards of the dashboard: mailboxes and webhooks (DL-11, WH-05), agents and tasks (AM-11, DL-12).

A board shows things as rows of lists, and one mailbox, message, agent or task in detail.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Container, Iterable
from typing import Any, Final

from connectors.doors.dashboard.past_records import RowView, milliseconds, shortened, task_as_json
from connectors.hub.live.row_lists import task_lists
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.services.mailboxes import token_mailbox
from connectors.hub.services.task_keeper import container_of
from connectors.hub.webhooks.deliverer import DOWN_AFTER
from schemas.fold.stream_kind import RUNNING, STOPPED
from schemas.streams.agents.agent_registry import DEFINED, AgentRow, ParticipantRow
from schemas.streams.container.containers import ContainerRow
from schemas.streams.mailboxes.message import (
    DEAD,
    DEFAULT_REALM,
    LEASED,
    PRIORITIES,
    UNREAD,
    MessageBodyRow,
    MessageRow,
)
from schemas.streams.principal import principals
from schemas.streams.principal.principals import OPERATOR
from schemas.streams.task.task_registry import TaskRow, TokenRow
from schemas.streams.webhook.webhooks import ACTIVE, PAUSED, WebhookRow, url_parts
from trunkline_agent.wire.message_fields import DESCRIPTION

BODY_CHARACTERS: Final = 65_536
WAITING: Final = "waiting"
# The number of mailboxes and of webhooks that are shown. The sums include all.
SHOWN: Final = 200
_FAILING, _DOWN = "failing", "down"
_PLACES: Final = {_DOWN: 0, _FAILING: 1, PAUSED: 2, ACTIVE: 3}
_PLACE: Final = {priority: place for place, priority in enumerate(PRIORITIES)}
_MESSAGE: Final = RowView(
    MessageRow,
    "message_id sender kind priority attempts handed_to in_reply_to replay_of",
    texts="last_reason",
    moments="posted_at handed_at lease_until ended_at",
)


class MailboxBoard:
    """Mailboxes, their messages and webhooks as JSON, made from the live view at each call. Thread-safe.

    The index has every waiting and leased message, and the dead ones among the newest 50,000 final messages.
    """

    def __init__(self, hub: Hub) -> None:
        self._live_view = hub.live_view
        self._index = hub.mailboxes
        self._health = hub.webhook_health

    def depth(self, name: str) -> int:
        """Return the number of messages that wait in a mailbox of the realm `default`."""
        return self._index.depth((DEFAULT_REALM, name))

    def counted(self, name: str) -> dict[str, Any]:
        """Return a mailbox of the realm `default` with the numbers of its waiting, leased and dead messages.

        A message whose lease has run out counts as waiting.
        """
        mailbox = DEFAULT_REALM, name
        ready = self._index.ready(mailbox, time.time_ns() // 1000)
        return {
            "realm": DEFAULT_REALM,
            "recipient": name,
            WAITING: ready,
            LEASED: max(0, self._index.depth(mailbox) - ready),
            DEAD: self._index.dead_count(mailbox),
        }

    def deepest(self) -> dict[str, Any]:
        """Return the 200 deepest mailboxes as JSON, deepest first, and two sums over all mailboxes.

        The mailboxes are in the list `mailboxes`. A mailbox without a waiting message is in it if it has dead
        ones. `messages` is the number of all waiting messages, leased ones included. `total` is the number of
        mailboxes with a waiting or dead message. A mailbox's `oldest_ms` is when its oldest waiting message was
        posted, in milliseconds since 1970 UTC. `dead` is the number of its dead messages in memory.
        """
        messages, total = self._index.totals()
        return {
            "mailboxes": [
                {
                    "realm": found.mailbox[0],
                    "recipient": found.mailbox[1],
                    "depth": found.depth,
                    "dead": found.dead,
                    "oldest_ms": milliseconds(found.oldest),
                }
                for found in self._index.deepest(SHOWN)
            ],
            "messages": messages,
            "total": total,
        }

    def webhooks(self) -> dict[str, Any]:
        """Return up to 200 webhooks in the list `webhooks`, and the number of all not removed in `total`.

        Those that are `down` come first, then `failing`, `paused` and `active` ones, each by name. Of a URL
        only the host is shown, because path and query may contain a secret. `state` is `paused`, `down` after
        three failed calls in a row, `failing` after one, or `active`. The calls are those of this gateway.
        """
        rows = [(self._webhook_state(row), row) for row in self._live_view.live(WebhookRow)]
        rows.sort(key=lambda one: (_PLACES[one[0]], one[1].webhook))
        return {"webhooks": [self._webhook(state, row) for state, row in rows[:SHOWN]], "total": len(rows)}

    def _webhook_state(self, row: WebhookRow) -> str:
        failures = self._health.of(row.webhook).failures_in_a_row
        if row.status == PAUSED:
            return PAUSED
        return _DOWN if failures >= DOWN_AFTER else _FAILING if failures else ACTIVE

    def _webhook(self, state: str, row: WebhookRow) -> dict[str, Any]:
        health, mailbox = self._health.of(row.webhook), (DEFAULT_REALM, row.webhook)
        return {
            "webhook": row.webhook,
            "state": state,
            "host": url_parts(row.url).host,
            "topic": row.topic,
            "pending": self._index.size(mailbox),
            "dead": self._index.dead_count(mailbox),
            "succeeded": health.succeeded,
            "failed": health.failed,
            "failures_in_a_row": health.failures_in_a_row,
            "last_success_ms": milliseconds(health.last_success_at),
            "last_failure_ms": milliseconds(health.last_failure_at),
            "why": shortened(row.why_paused if row.status == PAUSED else health.last_failure or None),
        }

    def contents(self, mailbox: Mailbox, limit: int) -> dict[str, Any]:
        """Return three lists of a mailbox's messages as JSON, each with its whole `count` and `messages`.

        `waiting` is in the order in which the messages are handed out. In `leased`, the lease that ends first
        is the first, and in `dead` the message that died last. The lists are empty for an unknown mailbox.

        Args:
            mailbox: Realm and recipient.
            limit: The largest number of messages in each list, at least 1.
        """
        now_us = time.time_ns() // 1000
        rows = [self._row(mailbox, message_id) for message_id in self._index.waiting(mailbox)]
        dead = self._index.dead_of(mailbox)
        gone = [row for one in dead[:limit] if (row := self._row(mailbox, one)) is not None]

        def listed(rows: list[MessageRow], count: int) -> dict[str, Any]:
            return {"count": count, "messages": [self._as_json(row, now_us) for row in rows]}

        def pending(state: str, order: Callable[[MessageRow], Any]) -> dict[str, Any]:
            found = [row for row in rows if row is not None and _state(row, now_us) == state]
            return listed(heapq.nsmallest(limit, found, key=order), len(found))

        return {
            WAITING: pending(WAITING, lambda row: (_PLACE[row.priority], row.posted_at, row.message_id)),
            LEASED: pending(LEASED, lambda row: (row.lease_until or 0, row.message_id)),
            DEAD: listed(gone, len(dead)),
        }

    def message(self, mailbox: Mailbox, message_id: str, role: str) -> dict[str, Any] | None:
        """Return one message as JSON with its body, or None if the live view does not have it.

        As with records, only the operator may see the body: for any other role, `body` is None. A body of more
        than 65,536 characters is cut, and then `body_cut` is true.
        """
        row = self._row(mailbox, message_id)
        if row is None:
            return None
        body = self._live_view.get(MessageBodyRow, row.key) if role == OPERATOR else None
        return {
            **self._as_json(row, time.time_ns() // 1000),
            "realm": row.realm,
            "recipient": row.recipient,
            "thread": row.thread,
            "expires_at": row.expires_at,
            "body": None if body is None else body.body[:BODY_CHARACTERS],
            "body_cut": body is not None and len(body.body) > BODY_CHARACTERS,
            "content_type": None if body is None else body.content_type,
        }

    def _row(self, mailbox: Mailbox, message_id: str) -> MessageRow | None:
        return self._live_view.get(MessageRow, "/".join((*mailbox, message_id)))

    def _as_json(self, row: MessageRow, now_us: int) -> dict[str, Any]:
        replays = self._index.replays((row.realm, row.recipient), row.message_id) if row.status == DEAD else []
        return {
            **_MESSAGE.of(row),
            "described": {
                one.label: value for one in DESCRIPTION if (value := getattr(row, one.name)) is not None
            },
            "state": _state(row, now_us),
            "sender_verified": row.from_verified,
            "replayed_as": replays[-1] if replays else None,
        }


def _state(row: MessageRow, now_us: int) -> str:
    """Return `waiting`, `leased`, or the final status of a message. An expired lease counts as none."""
    if row.status == UNREAD:
        return WAITING
    if row.status == LEASED:
        return LEASED if (row.lease_until or 0) > now_us else WAITING
    return row.status


WORKING: Final = "working"
EXPIRED: Final = "expired"
# The number of stopped agents that are shown, and of tasks, the newest first.
_STOPPED_SHOWN: Final = 50
_TASKS_SHOWN: Final = 100

_PARTICIPANT: Final = RowView(
    ParticipantRow,
    "task_id status task capabilities stopped_why",
    moments="started_at updated_at stopped_at",
)
_DEFINITION: Final = RowView(
    AgentRow, "status image description capabilities hardened", moments="defined_at removed_at"
)
_TASK_DETAILS: Final = RowView(TaskRow, "description error submitted_by session_name image")
_CONTAINER: Final = RowView(
    ContainerRow, "container state backend host port error", moments="created_at changed_at"
)


def worker_key(task_id: str) -> str:
    """Return `task:<task id>`, the row key of an agent that runs for a task and is no participant."""
    return f"task:{task_id}"


class AgentBoard:
    """The dashboard's agents and tasks as JSON, made from the live view at each call. Thread-safe.

    The `key` of an agent's row is the participant's name, or `task:<task id>` for an agent that is no
    participant.
    """

    def __init__(self, hub: Hub, mailboxes: MailboxBoard) -> None:
        self._live_view = hub.live_view
        self._lists = hub.lists
        self._mailboxes = mailboxes
        self._per_token = hub.settings.gateway.mailbox_per_token

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all agents as JSON, for a page that has none yet.

        First come the present participants by name, then the agents of running tasks that are no participants,
        then the 50 participants that stopped last.
        """
        present = self._lists.participants_with(None)
        tasks = [task for task in self._lists.tasks.newest([RUNNING]) if not self._has_joined(task)]
        return [
            *map(self._participant, present),
            *map(self._worker, sorted(tasks, key=lambda task: (task.agent_name, task.task_id))),
            *map(self._participant, self._lists.participants.newest([STOPPED], _STOPPED_SHOWN)),
        ]

    def changed(
        self, agents: Iterable[str], tasks: Iterable[str], turned: Container[str]
    ) -> list[dict[str, Any]]:
        """Return the current rows of some agents and tasks, to update a page that already has earlier rows.

        A row that the page must remove has only its `key` and `gone: true`. A task's row is removed when the
        task ends, or when the task's agent joins as a participant with a row of its own.

        Args:
            agents: Names of participants whose rows may have changed. Unknown names are ignored.
            tasks: Ids of tasks whose rows may have changed. An unknown id gives a row to remove.
            turned: The names of the agents that have joined or stopped. The rows of the tasks for which they
                were started are returned, too.
        """
        found: list[dict[str, Any]] = []
        touched = set(tasks)
        for name in sorted(set(agents)):
            row = self._live_view.get(ParticipantRow, name)
            if row is not None:
                found.append(self._participant(row))
                if row.task_id is not None and name in turned:
                    touched.add(row.task_id)
        for task_id in sorted(touched):
            task = self._live_view.get(TaskRow, task_id)
            if task is not None and task.status == RUNNING and not self._has_joined(task):
                found.append(self._worker(task))
            else:
                found.append({"key": worker_key(task_id), "gone": True})
        return found

    def tasks(self, agent_name: str | None = None) -> dict[str, Any]:
        """Return the newest 100 tasks as JSON, newest first, and their whole number as `total`.

        With `agent_name`, only the tasks of this agent.
        """
        lists = task_lists(None, agent_name)
        newest = self._lists.tasks.newest(lists, _TASKS_SHOWN)
        total = self._lists.tasks.count(lists)
        return {"tasks": [task_as_json(self._live_view, row) for row in newest], "total": total}

    def agent(self, name: str) -> dict[str, Any] | None:
        """Return an agent with its mailbox's counts and its newest tasks; None if nothing of this name exists.

        `agent` is the row of the participant, and None for an agent that is no participant. `definition` is
        that of the folder `conf/agents`, and None without one. It may have been removed since.
        """
        participant = self._live_view.get(ParticipantRow, name)
        definition = self._live_view.get(AgentRow, name)
        tasks = self.tasks(name)
        if participant is None and definition is None and not tasks["total"]:
            return None
        shown = None
        if definition is not None:
            shown = {**_DEFINITION.of(definition), "is_defined": definition.status == DEFINED}
        return {
            "name": name,
            "agent": None if participant is None else self._participant(participant),
            "definition": shown,
            "mailbox": self._mailboxes.counted(name),
            **tasks,
        }

    def task(self, task_id: str) -> dict[str, Any] | None:
        """Return a task with its token's state, its container and its result; None for an unknown task.

        `token` has neither the token nor its hash or id. `token` and `container` are None if there is none.
        `result` is the stored text of the result.
        """
        row = self._live_view.get(TaskRow, task_id)
        if row is None:
            return None
        token = None if row.token_id is None else self._live_view.get(TokenRow, row.token_id)
        container = self._live_view.get(ContainerRow, container_of(task_id))
        own = self._per_token and row.token_id is not None
        return {
            "task": {**task_as_json(self._live_view, row), **_TASK_DETAILS.of(row)},
            "result": row.result,
            "capabilities": [] if token is None else token.capabilities,
            "token": None if token is None else _token_as_json(token),
            "container": None if container is None else _CONTAINER.of(container),
            "mailbox": self._mailboxes.counted(
                token_mailbox(row.agent_name, str(row.token_id)) if own else row.agent_name
            ),
        }

    def _has_joined(self, task: TaskRow) -> bool:
        """Return whether the agent of a task is a present participant, which has the task's agent name."""
        agent = self._live_view.get(ParticipantRow, task.agent_name)
        return agent is not None and agent.task_id == task.task_id and agent.status != STOPPED

    def _participant(self, row: ParticipantRow) -> dict[str, Any]:
        return {
            **_PARTICIPANT.of(row),
            "key": row.agent_name,
            "agent": row.agent_name,
            "kind": "participant",
            "waiting": self._mailboxes.depth(row.agent_name),
        }

    def _worker(self, row: TaskRow) -> dict[str, Any]:
        began_ms = milliseconds(row.started_at or row.submitted_at)
        return {
            "key": worker_key(row.task_id),
            "agent": row.agent_name,
            "kind": "task",
            "task_id": row.task_id,
            "status": WORKING,
            "task": row.description,
            "capabilities": [],
            "started_ms": began_ms,
            "updated_ms": began_ms,
            "stopped_ms": None,
            "stopped_why": None,
            "waiting": self._mailboxes.depth(row.agent_name),
        }


def _token_as_json(row: TokenRow) -> dict[str, Any]:
    is_expired = row.status == principals.ACTIVE and row.expiry <= time.time() * 1000
    return {
        "status": EXPIRED if is_expired else row.status,
        "issued_ms": row.issued,
        "expiry_ms": row.expiry,
        "revoked_ms": milliseconds(row.revoked_at),
        "revoked_why": row.revoked_why,
    }
