"""The table of samples: for each declared operation a request that works, and who may send it.

The table does not follow the declarations: a test that compares both finds what a declaration says wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from connectors.hub.serving.policy import Reach
from tests.matrix.ground import Caller, Ground, Request, fresh, new_key

Make = Callable[[Ground, Caller], Any]
"""Makes the things of a request about something that the caller owns, if it may own such a thing. Returns the
parameters of the path, or also fields of the body, or a whole request."""


@dataclass(frozen=True)
class Sample:
    """A request for an operation that works.

    Attributes:
        may: The letters of the roles that may send it: capital for all things, small for their own alone.
        make: Makes the things that it is about.
        body: The fields of its body: all of the model but `lacks`, with values that no other field has.
        other: Fields of another content, which conflicts under the same idempotency key. None: there is none.
        lacks: Fields that it leaves out, with the reason.
        unknown: The status for the operator if nothing has the name in the path.
        changes: The fields of the answer that another answer to the same request has otherwise.
        status: The status of its answer.
        is_known: Whether a repeated request has the verdict `duplicate`.
        is_alone: Whether it works without the services that run beside a gateway.
    """

    may: str
    make: Make
    body: Mapping[str, Any] | None = None
    other: Mapping[str, Any] | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)
    unknown: int = 404
    changes: tuple[str, ...] = ()
    status: int = 200
    is_known: bool = True
    is_alone: bool = True

    def request(self, ground: Ground, owner: Caller, **changed: Any) -> Request:
        """Return a request about a new thing of an owner."""
        made = self.make(ground, owner)
        if isinstance(made, Request):
            return made
        path, fields = made if isinstance(made, tuple) else (made, {})
        body = None if self.body is None else {**self.body, **fields, **changed}
        return Request(path, body)

    def reach(self, letter: str) -> Reach | None:
        """Return the things that a role may send it about. None: none."""
        return Reach.ALL if letter.upper() in self.may else Reach.OWN if letter in self.may else None


def _none(ground: Ground, owner: Caller) -> dict[str, str]:
    return {}


def _named(maker: Callable[[Ground, Caller], Any], parameter: str = "name") -> Make:
    return lambda ground, owner: {parameter: maker(ground, owner)}


def _new(kind: str, parameter: str) -> Make:
    """Make the name of a thing in the body that does not exist."""
    return lambda ground, owner: ({}, {parameter: fresh(kind)})


_OWN_MAILBOX: Final = _named(lambda ground, owner: ground.mailbox(owner).name)
_JOB: Final = _named(Ground.job, "job_id")
_TASK: Final = _named(lambda ground, owner: ground.task(owner)["id"], "task_id")
_SENT: Final = {
    "type": "type-of-the-field",
    "payload": {"in": "the-payload"},
    "priority": "high",
    "expires_in_s": 7201,
    "deliver_after_s": 61,
    "subject": "the-subject",
}
_IN_THREAD: Final = {"in_reply_to": "the-message-before", "thread": "the-thread"}
_BLOB: Final = {"blob": "needs an upload; tests/connectors/doors/http_api/test_hub_blobs.py"}
_OTHER_REASON: Final = {"reason": "another-reason"}
_WHERE: Final = {"host": "the-host", "handle": "process/4711/1"}


def _mailbox_and(thing: Callable[[Ground, Caller], str] | None = None) -> Make:
    def made(ground: Ground, owner: Caller) -> dict[str, str]:
        path = {"realm": "default", "name": ground.mailbox(owner).name}
        return path if thing is None else {**path, "message_id": thing(ground, owner)}

    return made


def _leased(ground: Ground, owner: Caller) -> tuple[dict[str, str], dict[str, Any]]:
    return {}, ground.leased(owner)


def _drain(ground: Ground, owner: Caller) -> Request:
    ground.message(owner)
    return Request({}, query="?limit=1000")


def _job_with_broker(ground: Ground, owner: Caller) -> dict[str, str]:
    body = {"description": "x", "broker": {"host": "a.broker"}}
    ground.do("POST", "/jobs", body, ground.as_owner(owner, "od"))
    return {}


def _key_of(ground: Ground, owner: Caller) -> dict[str, str]:
    joined = ground.joined()
    return {"name": joined["id"], "key_id": joined["keys"][0]["key_id"]}


SAMPLES: Final[dict[str, Sample]] = {
    # Messages of one mailbox.
    "send_message": Sample(
        "ODWA", _none, {"recipient": "hub", **_SENT, **_IN_THREAD}, {"payload": 2}, {**_BLOB}
    ),
    "broadcast_message": Sample("ODWA", _none, _SENT, {"payload": 2}, _BLOB),
    "read_audit": Sample("ODV", _none),
    "drain_messages": Sample("ODWA", _drain, changes=("left",), is_known=False),
    "count_messages": Sample("ODWA", _none),
    "mark_messages_read": Sample(
        "ODWA", lambda ground, owner: ({}, {"message_ids": [ground.message(owner)]}), {}
    ),
    "acknowledge_messages": Sample("ODWA", _leased, {}),
    "give_back_messages": Sample("ODWA", _leased, {"reason": "the-reason"}),
    "extend_lease": Sample("ODWA", _leased, {"lease": 4711}),
    # Jobs.
    "register_job": Sample(
        "OD",
        _none,
        {
            "description": "the-description",
            "session": "the-session",
            "broker": {"host": "the.broker", "port": 4711},
            "notify": ["permission"],
        },
        {"description": "another-description"},
        changes=("position",),
        status=201,
    ),
    "pick_job": Sample("Ow", lambda ground, owner: ({}, {"session": ground.job_for(owner)}), {}),
    "cancel_job": Sample("Od", _JOB, {"reason": "the-reason"}, _OTHER_REASON, changes=("verdict",)),
    "assign_job": Sample(
        "Od",
        lambda ground, owner: ({"job_id": ground.job(owner)}, {"session": fresh("session")}),
        {},
        changes=("verdict",),
    ),
    "rotate_job_secret": Sample(
        "Od", _JOB, {"overlap_s": 4711}, {"overlap_s": 2}, changes=("position",), status=201
    ),
    "list_jobs": Sample("ODV", _none),
    "show_job": Sample("ODwV", _named(Ground.job_held, "job_id")),
    "list_brokers": Sample("O", _job_with_broker),
    # Sessions.
    "create_session": Sample(
        "OD",
        _new("session", "session"),
        {"description": "the-description", **_WHERE, "for_job": "0a1b2c3d"},
        {"description": "another-description"},
        status=201,
    ),
    "stop_session": Sample(
        "Od",
        _named(Ground.session),
        {"mode": "hard", "reason": "the-reason", "capture_id": "the-capture", "graceful": True},
        _OTHER_REASON,
    ),
    "resume_session": Sample(
        "Od", _named(lambda ground, owner: ground.session(owner, "stop")), _WHERE, {"host": "another-host"}
    ),
    "list_sessions": Sample("ODV", _none),
    "show_session": Sample("ODV", _named(Ground.session)),
    # Principals, mailboxes and limits.
    "add_principal": Sample("O", _new("new", "principal"), {"role": "viewer"}, {"role": "worker"}, status=201),
    "list_principals": Sample("O", _none),
    "revoke_principal": Sample("O", _named(lambda ground, _: ground.principal("v").name), {}),
    "show_mailbox": Sample("Odwa", _mailbox_and(), unknown=200),
    "clear_mailbox": Sample("O", _mailbox_and(), {}, changes=("cleared",), unknown=200),
    "report_mqtt_load": Sample(
        "O", _none, {"agents": {"an-agent": 3}, "jobs": {"0a1b2c3d": 1}, "unconfirmed": {}}, is_known=False
    ),
    "list_limits": Sample("O", _none),
    "set_limits": Sample(
        "O",
        lambda ground, _: {"scope": "name", "name": fresh("limited")},
        {
            "pending_most": 4711,
            "bytes_most": 4712,
            "messages_per_minute": 4713,
            "bytes_per_minute": 4714,
            "live_jobs_most": 4715,
            "subscriptions_most": 4716,
        },
        {"pending_most": 1, "messages_per_minute": 1},
        unknown=200,
    ),
    "list_dead_messages": Sample("O", _none),
    "replay_message": Sample("Odwa", _mailbox_and(Ground.dead), {}),
    # Topics.
    "publish_message": Sample(
        "ODWA", _named(Ground.topic, "topic"), {**_SENT, **_IN_THREAD}, {"payload": 2}, _BLOB
    ),
    "subscribe_mailbox": Sample(
        "Odwa",
        lambda ground, owner: ({"topic": fresh("topic")}, {"subscriber": ground.mailbox(owner).name}),
        {},
        {"subscriber": "hub"},
        unknown=200,
    ),
    "unsubscribe_mailbox": Sample(
        "Odwa",
        lambda ground, owner: ({"topic": ground.topic(owner)}, {"subscriber": ground.mailbox(owner).name}),
        {},
        {"subscriber": "hub"},
    ),
    "list_topics": Sample("ODWAV", _none),
    "show_topic": Sample("ODWAV", _named(Ground.topic, "topic")),
    # Schedules and webhooks.
    "set_schedule": Sample(
        "Odwa",
        _named(Ground.schedule),
        {
            "recipient": "hub",
            "type": "type-of-the-field",
            "payload": {"in": "the-payload"},
            "every_s": 7261,
            "missed": "latest",
            "priority": "high",
            "expires_in_s": 7201,
        },
        {"every_s": 7262},
        {"cron": "excludes every_s"},
        unknown=200,
    ),
    "remove_schedule": Sample("Odwa", _named(Ground.schedule), {}),
    "list_schedules": Sample("ODWA", _none),
    "show_schedule": Sample("Odwa", _named(Ground.schedule)),
    "set_webhook": Sample(
        "Odw",
        _named(Ground.webhook),
        {"url": "https://example.org/the-url", "overlap_s": 4711},
        {"url": "https://example.org/another-url"},
        {"topic": "the operator alone; see tests/connectors/doors/http_api/test_hub_webhooks.py"},
    ),
    "pause_webhook": Sample(
        "Odw",
        _named(lambda ground, owner: ground.webhook(owner, "")),
        {"reason": "the-reason"},
        _OTHER_REASON,
    ),
    "resume_webhook": Sample("Odw", _named(lambda ground, owner: ground.webhook(owner, "", "/pause")), {}),
    "remove_webhook": Sample("Odw", _named(lambda ground, owner: ground.webhook(owner, "")), {}),
    "test_webhook": Sample(
        "Odw",
        _named(lambda ground, owner: ground.webhook(owner, "")),
        {},
        changes=("milliseconds",),
        is_known=False,
    ),
    "list_webhooks": Sample("ODWA", _none),
    "show_webhook": Sample("Odwa", _named(lambda ground, owner: ground.webhook(owner, ""))),
    # Agents, tasks and tokens.
    "list_agents": Sample("ODWAV", _none),
    "show_agent": Sample("ODWAV", lambda ground, _: {"name": "echo"}),
    "list_containers": Sample("ODV", _none),
    "submit_task": Sample(
        "OD",
        _none,
        {"description": "the-description", "agent_name": "echo"},
        {"description": "another-description"},
        status=201,
    ),
    "complete_task": Sample("Oda", _TASK, {"result": "the-result"}, {"result": "another-result"}),
    "fail_task": Sample("Oda", _TASK, {"error": "the-error"}, {"error": "another-error"}),
    "cancel_task": Sample("Od", _TASK, {"reason": "the-reason"}, _OTHER_REASON),
    "delete_task": Sample("Od", _TASK),
    "list_tasks": Sample("ODV", _none),
    "show_task": Sample("ODVa", _TASK),
    "list_tokens": Sample("ODV", _none),
    "revoke_token": Sample(
        "Od",
        _named(lambda ground, owner: ground.task(owner)["token_id"], "token_id"),
        {"reason": "the-reason"},
        _OTHER_REASON,
    ),
    # Participants, over MCP or MQTT.
    "register_participant": Sample(
        "O",
        lambda ground, _: ({}, {"agent_name": fresh("agent"), "public_key": new_key()}),
        {"task": "the-task", "capabilities": ["the-capability"]},
        {"task": "another-task"},
        status=201,
    ),
    "spawn_participant": Sample(
        "O",
        _new("agent", "agent_name"),
        {"task": "the-task", "capabilities": ["the-capability"]},
        {"task": "another-task"},
        status=201,
        is_alone=False,
    ),
    "list_participants": Sample("ODWAV", _none),
    "show_participant": Sample("ODWAV", lambda ground, _: {"name": ground.known["id"]}),
    "stop_participant": Sample(
        "O", lambda ground, _: {"name": ground.joined()["id"]}, {"reason": "the-reason"}
    ),
    "register_key": Sample(
        "O",
        lambda ground, _: ({"name": ground.joined()["id"]}, {"public_key": new_key()}),
        {"overlap_s": 4711},
        {"overlap_s": 2},
    ),
    "remove_key": Sample("O", _key_of, {}),
    "register_mqtt_agent": Sample(
        "O", lambda ground, _: {"name": fresh("by-mqtt")}, {}, status=201, unknown=201
    ),
    "remove_mqtt_agent": Sample("O", lambda ground, _: {"name": ground.by_mqtt()}, {}),
    "list_mqtt_agents": Sample("ODWAV", _none),
    # Listeners. Messages of the XML door alone make threads.
    "list_listeners": Sample("O", _none),
    "list_threads": Sample("O", _none),
    "show_thread": Sample("O", lambda ground, _: {"name": "no-thread"}, status=404),
}
"""The samples by the names of the operations."""
