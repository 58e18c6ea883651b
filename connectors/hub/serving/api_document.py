"""The OpenAPI document of the hub: what FastAPI makes of routes and models, with roles and examples added.

There is one example value for each field name, so that all operations tell one story. The planner has the job
`0a1b2c3d` done in the session `research-1`, and writes to the agent `echo`. The examples of requests fit
together: a picked job has made `research-1` known, so a new session has another name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastapi import FastAPI

MOMENT: Final = "2026-01-31T12:00:00.250Z"
_CE_ID: Final = "4d1c8a0b" * 8
_LEASE: Final = "b7f1a9d2-3c4e-5f60-8a7b-9c0d1e2f3a4b"
_MESSAGE: Final = "9f0e5f6d-4f0a-5a3b-8a4c-3d1c5f7b9e21"
_ONCE: Final = "<secret, shown once>"
_TASK: Final = "0b5c3f1e-7a2d-5e48-9c61-2f3a4b5c6d7e"
_THREAD: Final = "5b1c0f7e-6d2b-5f19-9a53-5d1f0f0c9d88"
_XML: Final = (
    '<calculate xmlns="urn:trunkline:sample:1">'
    "<operation>add</operation><first>2</first><second>3</second></calculate>"
)
_PUBLIC_KEY: Final = """\
-----BEGIN PUBLIC KEY-----
MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEAser9PIfz/O3et1on+T8E
xbtOHeqCG2psWLp/y5/uFoEa/R74JFU3yHLee6ncMtyq5woe4QgzC8FLMG+dQmKZ
Y0eF2sWXRblQVvRsmzEdocbNRX+ekMEU1ziuJNCOZTSBORFsArTB8WCqXwM31qNb
H6kt8rF9PEs/30xaJ9JuzzBkC/kJ/5QP2sV8Y1oV6pDaNflr4Jh8iBuTTWPL2qHZ
hZfvYyEDh09gvFAF4V/ZEJeDlZ0JJHdogUTf/fxF83NuHjlkNAXeHab5sa08F9cd
zdsyzdn7Iifdz7EF9c4cJ/D7b2ANkeKWtB0IJWr/Sd9KfvUwduJQHUf0iviAjz7l
owIDAQAB
-----END PUBLIC KEY-----
"""

# The value of a field or path parameter by its name, or by `Model.field` or `part of the path.parameter`. A
# field that may be null needs none.
EXAMPLES: Final[dict[str, Any]] = {
    # Names.
    "added_by": "operator",
    "agent_name": "echo",
    "container_name": "echo-0b5c3f1e",
    "created_by": "planner",
    "handed_to": "http/echo",
    "id": "echo",
    "listener": "calculator",
    "mailbox": "echo",
    "mqtt_user": "0a1b2c3d.1",
    "name": "echo",
    "on_behalf_of": "planner",
    "opened_by": "researcher",
    "principal": "planner",
    "principals.name": "planner",
    "pump": "pump-1",
    "realm": "default",
    "recipient": "echo",
    "registered_by": "planner",
    "role": "delegator",
    "owner": "planner",
    "schedule": "status-report",
    "schedules.name": "status-report",
    "seen_by": "calculator",
    "sender": "planner",
    "session": "research-1",
    "session_name": "echo-0b5c3f1e",
    "sessions.name": "research-1",
    "submitted_by": "planner",
    "threads.name": _THREAD,
    "set_by": "operator",
    "to": "calculator",
    "webhook": "echo",
    "subscribed_by": "http/echo",
    "subscriber": "echo",
    "topic": "news",
    "MessageAnswer.topic": None,
    "MailboxMessageAnswer.topic": None,
    "TopicAnswer.name": "news",
    "WebhookAnswer.topic": None,
    "WebhookGrantAnswer.topic": None,
    "TopicShownAnswer.name": "news",
    "JoinRequest.agent_name": "translator",
    "MqttLoadRequest.agents": {"echo": 1200},
    "MqttLoadRequest.jobs": {"0a1b2c3d": 15},
    "ListedMqttAgent.unconfirmed": 0,
    "MqttLoadAnswer.agents": {"echo": 60},
    "MqttLoadAnswer.jobs": {},
    "SessionContextAnswer.role": "agent",
    "SessionRequest.session": "research-2",
    # Ids.
    "ce_id": _CE_ID,
    "job_id": "0a1b2c3d",
    "key_id": "1f2e3d4c5b6a7988",
    "lease_id": _LEASE,
    "message_id": _MESSAGE,
    "request_id": _LEASE,
    "root_thread": _THREAD,
    "task_id": _TASK,
    "thread": _THREAD,
    "token_id": "a1b2c3d4e5f6",
    "BlobAnswer.bytes": 20_971_520,
    "BlobAnswer.content_type": "application/pdf",
    "StoredBlobAnswer.bytes": 20_971_520,
    "StoredBlobAnswer.content_type": "application/pdf",
    "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "BroadcastAnswer.broadcast_id": _MESSAGE,
    "MessageAnswer.id": _MESSAGE,
    "TaskAnswer.id": _TASK,
    "done": [_MESSAGE],
    "last_message_id": _MESSAGE,
    "message_ids": [_MESSAGE],
    "read": [_MESSAGE],
    "not_marked": [],
    "unknown": [],
    # States.
    "ended_at": None,
    "deliver_at": None,
    "last_said_at": None,
    "old_secret_ends_at": None,
    "removed_at": None,
    "revoked_at": None,
    "state": "running",
    "status": "running",
    "stopped_at": None,
    "valid_until": None,
    "verdict": "accepted",
    "AgentAnswer.status": "defined",
    "AuditEntry.verdict": "delivered",
    "HealthAnswer.status": "ok",
    "ListenerAnswer.status": "active",
    "MailboxMessageAnswer.status": "unread",
    "MqttAgentAnswer.status": "registered",
    "ParticipantAnswer.status": "idle",
    "PrincipalAnswer.status": "active",
    "SubscribedAnswer.status": "subscribed",
    "ListedSchedule.status": "active",
    "ScheduleAnswer.status": "active",
    "ReadyAnswer.status": "ready",
    "RotatedAnswer.old_secret_ends_at": MOMENT,
    "TokenAnswer.status": "active",
    "WebhookAnswer.status": "active",
    "WebhookGrantAnswer.status": "active",
    "WebhookTestAnswer.status": 200,
    "last_failure_at": None,
    # Contents.
    "backend": "local",
    "body": _XML,
    "ListedSchedule.body": '{"text":"hello"}',
    "MailboxMessageAnswer.body": '{"text":"hello"}',
    "ScheduleAnswer.body": '{"text":"hello"}',
    "brokers": ['{"host":"broker.example","port":8883,"tls":true}'],
    "capabilities": ["text"],
    "capability": "Adds, subtracts, multiplies and divides two numbers.",
    "content_type": "application/json",
    "cron": "0 9 * * 1-5",
    "PumpMessage.content_type": "application/xml",
    "description": "Summarize the report",
    "TaskFailureRequest.error": "the report is empty",
    "faults": {},
    "handle": "tmux/trunkline/research-1",
    "handler": "connectors.tools.sample_organism.listeners:calculate",
    "host": "worker-1",
    "image": "trunkline/echo",
    "kind": "calculate",
    "ListedSchedule.kind": "ask",
    "MailboxMessageAnswer.kind": "ask",
    "ScheduleAnswer.kind": "ask",
    "lag": {"0": 0},
    "last_detail": "build begins",
    "last_event": "started",
    "message": "no job with this id",
    "missed": "latest",
    "LeaseFault.message": "the lease has ended, and the message was handed out again",
    "notify": ["end"],
    "namespace": "urn:trunkline:sample:1",
    "payload": {"text": "hello"},
    "priority": "normal",
    "public_key": _PUBLIC_KEY,
    "reason": "no longer needed",
    "AuditEntry.reason": None,
    "ErrorAnswer.reason": "not_found",
    "LeaseFault.reason": "illegal_transition",
    "SessionAnswer.reason": None,
    "SettleResult.reason": None,
    "result": {"summary": "All is well."},
    "root_tag": "calculate",
    "secrets": ["TRUNKLINE_AGENT_TOKEN"],
    "task": "Translate messages",
    "type": "ask",
    "ListenerAnswer.type": "handler",
    "limited_by": "http/operator",
    "LimitAnswer.scope": "role",
    "LimitAnswer.name": "worker",
    "url": "http://127.0.0.1:3200",
    "WebhookAnswer.url": "https://agents.example.org/inbox",
    "WebhookGrantAnswer.url": "https://agents.example.org/inbox",
    "visible_tools": [],
    # Access.
    "GrantAnswer.broker": None,
    "JobShownAnswer.broker": None,
    "inbox": "python/mqtt/agents/echo/inbox",
    "outbox": "python/mqtt/agents/echo/outbox",
    "prefix": "python/mqtt/agents",
    "password": _ONCE,
    "secret": _ONCE,
    "token": _ONCE,
    "username": "agent-echo",
    # Numbers.
    "bytes_most": 10_000_000,
    "live_jobs_most": 500,
    "messages_per_minute": 600,
    "pending_default": 100_000,
    "pending_most": 1000,
    "subscriptions_default": 1000,
    "attempt": 1,
    "attempts": 1,
    "cleared": 3,
    "dead": 0,
    "failed": 0,
    "failures_in_a_row": 0,
    "milliseconds": 41,
    "pending": 0,
    "succeeded": 7,
    "concurrency": 4,
    "events": 1,
    "expiry": 1_769_864_400_250,
    "free": 4,
    "full": 0,
    "issued": 1_769_860_800_250,
    "jobs_ended": 2,
    "last_seq": 1,
    "late_runs": 0,
    "lease": 60,
    "left": 0,
    "limit": 100,
    "messages": 0,
    "missed_runs": 0,
    "refused_run_at": None,
    "next_runs": ["2026-02-02T09:00:00Z", "2026-02-03T09:00:00Z"],
    "overlap_s": 3600,
    "position": [2, 4711],
    "publications": 7,
    "recipients": 3,
    "released": 0,
    "revision": 1,
    "runs": 12,
    "seq": 1,
    "subscribers": 3,
    "suspects": 0,
    "timeout_ms": 5000,
    "total": 1,
    "version": 1,
    "wait_ms": 0,
    "waiting": 0,
    "wants": {"calculator": 4},
}
_EVENT: Final = f'{{"position":[2,4711],"stream":"job/0a1b2c3d","type":"job.event","ce_id":"{_CE_ID}"}}'
# The example of an answer that is text, by its media type.
TEXTS: Final = {
    "text/event-stream": f"id: 1769860800250000\nevent: settled\ndata: {_EVENT}\n\n",
    "application/x-ndjson": '{"settled":[[2,4711,"accepted",null]]}\n{}\n',
    "text/plain": "# TYPE trunkline_gateway_requests_total counter\n",
}


Schema = dict[str, Any]
BEARER: Final = "HTTPBearer"
ROLES_LINE: Final = "\n\nRoles: "
_ABOUT: Final = (
    "The HTTP API of Trunkline. Each request carries the token of a principal or of a task's agent. Each "
    "operation lists the roles that may use it; `own` means only for things that the caller made or holds."
)


class MissingExample(LookupError):
    """A field or path parameter of the API has no example value. Add one to `EXAMPLES`."""


def documented(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application, with groups, roles, examples and the bearer token added.

    Use it as the application's method `openapi`. The document is made once.

    Raises:
        MissingExample: A field or path parameter has no example.
    """
    if app.openapi_schema is None:
        page = FastAPI.openapi(app)
        page["info"]["description"] = _ABOUT
        bearer = {"type": "http", "scheme": "bearer", "description": "A principal's token."}
        page.setdefault("components", {})["securitySchemes"] = {BEARER: bearer}
        for path, methods in page["paths"].items():
            for operation in methods.values():
                _complete(operation, path, page["components"]["schemas"])
    return app.openapi_schema or {}


def _complete(operation: dict[str, Any], path: str, schemas: dict[str, Any]) -> None:
    parts = [part for part in path.split("/") if part not in {"", "api", "hub"}]
    operation["tags"] = parts[:1]
    roles = operation.get("x-trunkline-roles")
    said = "all, without a token" if roles is None else ", ".join(_with_reach(roles))
    operation["description"] = f"{operation.get('description', '')}{ROLES_LINE}{said}."
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            before = path.split(f"/{{{parameter['name']}}}")[0].rpartition("/")[2]
            parameter["example"] = _example(parameter["schema"], {}, f"{before}.{parameter['name']}")
    for media in operation.get("requestBody", {}).get("content", {}).values():
        if "example" not in media:
            media["example"] = _example(media["schema"], schemas, is_request=True)
    for answer in operation["responses"].values():
        for media_type, media in answer.get("content", {}).items():
            if "example" not in media:
                is_text = media["schema"].get("type") == "string"
                media["example"] = TEXTS[media_type] if is_text else _example(media["schema"], schemas)


def _with_reach(roles: dict[str, str]) -> Iterator[str]:
    return (role if reach == "all" else f"{role} ({reach})" for role, reach in roles.items())


def _example(
    schema: Schema, schemas: Schema, name: str = "", *, is_request: bool = False, may_be_null: bool = False
) -> Any:
    """Return an example of a schema, from the examples of its fields.

    Args:
        schema: The schema.
        schemas: The schemas of the document, by name.
        name: The place of the schema, as `Model.field`; empty for a whole body.
        is_request: Leave out the fields that may be null, because a client need not send them.
        may_be_null: Whether null is an example of the field, if there is no other one.
    """
    if name in EXAMPLES:
        return EXAMPLES[name]
    match schema:
        case {"examples": [first, *_]}:
            return first
        case {"$ref": ref}:
            model = ref.rpartition("/")[2]
            fields, required = schemas[model].get("properties", {}), schemas[model].get("required", ())
            return {
                field: _example(one, schemas, f"{model}.{field}", is_request=is_request)
                for field, one in fields.items()
                if field in required or not (is_request and {"type": "null"} in one.get("anyOf", ()))
            }
        case {"items": {"$ref": _} as item}:
            return [_example(item, schemas, is_request=is_request)]
        case {"anyOf": [first, *others]}:
            is_optional = {"type": "null"} in others
            return _example(first, schemas, name, is_request=is_request, may_be_null=is_optional)
        case {"type": "null"}:
            return None
    short = name.rpartition(".")[2]
    if short in EXAMPLES:
        return EXAMPLES[short]
    match schema:
        case {"enum": [first, *_]} | {"const": first}:
            return first
        case {"format": "date-time"}:
            return MOMENT
        case {"type": "boolean"}:
            return schema.get("default", False)
    if may_be_null:
        return None
    raise MissingExample(f"no example for {name or schema}: add it to connectors.hub.serving.api_document")
