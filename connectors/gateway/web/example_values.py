"""The example values of the OpenAPI document: one for each field name, so that all operations tell one story.

The planner has the job `0a1b2c3d` done in the session `research-1`, and writes to the agent `echo`. The
examples of requests fit together: a picked job has made `research-1` known, so a new session has another name.
"""

from __future__ import annotations

from typing import Any, Final

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

# The value of a field or path parameter by its name, or by `Model.field` or `part of the path.parameter`.
EXAMPLES: Final[dict[str, Any]] = {
    # Names.
    "added_by": "operator",
    "agent_name": "echo",
    "agents.name": "echo",
    "container_name": "echo-0b5c3f1e",
    "created_by": "planner",
    "handed_to": "http/echo",
    "id": "echo",
    "listener": "calculator",
    "mailbox": "echo",
    "mailboxes.realm": "default",
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
    "seen_by": "calculator",
    "sender": "planner",
    "session": "research-1",
    "session_name": "echo-0b5c3f1e",
    "sessions.name": "research-1",
    "session_wanted": None,
    "submitted_by": "planner",
    "threads.name": _THREAD,
    "to": "calculator",
    "topic": "news",
    "JoinRequest.agent_name": "translator",
    "SessionContextAnswer.role": "agent",
    "SessionRequest.session": "research-2",
    # Ids.
    "broadcast_id": None,
    "capture_id": None,
    "ce_id": _CE_ID,
    "ended_by": None,
    "for_job": None,
    "from_task": None,
    "in_reply_to": None,
    "job_id": "0a1b2c3d",
    "key_id": "1f2e3d4c5b6a7988",
    "lease_id": _LEASE,
    "message_id": _MESSAGE,
    "parent_thread": None,
    "replay_of": None,
    "request_id": _LEASE,
    "root_thread": _THREAD,
    "task_id": _TASK,
    "thread": _THREAD,
    "token_id": "a1b2c3d4e5f6",
    "BroadcastAnswer.broadcast_id": _MESSAGE,
    "MessageAnswer.id": _MESSAGE,
    "TaskAnswer.id": _TASK,
    "done": [_MESSAGE],
    "message_ids": [_MESSAGE],
    "read": [_MESSAGE],
    "not_marked": [],
    "unknown": [],
    # States.
    "ended_at": None,
    "expires_at": None,
    "fault": None,
    "last_reason": None,
    "last_said_at": None,
    "lease_until": None,
    "old_secret_ends_at": None,
    "removed_at": None,
    "revoked_at": None,
    "revoked_why": None,
    "sent_at": None,
    "state": "running",
    "status": "running",
    "stopped_at": None,
    "stopped_why": None,
    "valid_until": None,
    "verdict": "accepted",
    "why": None,
    "AgentAnswer.status": "defined",
    "AuditEntry.verdict": "delivered",
    "HealthAnswer.status": "ok",
    "ListenerAnswer.status": "active",
    "MailboxMessageAnswer.status": "unread",
    "MqttAgentAnswer.status": "registered",
    "ParticipantAnswer.status": "idle",
    "PrincipalAnswer.status": "active",
    "ReadyAnswer.status": "ready",
    "RotatedAnswer.old_secret_ends_at": MOMENT,
    "TokenAnswer.status": "active",
    # Contents.
    "backend": "local",
    "body": _XML,
    "MailboxMessageAnswer.body": '{"text":"hello"}',
    "brokers": ['{"host":"broker.example","port":8883,"tls":true}'],
    "capabilities": ["text"],
    "capability": "Adds, subtracts, multiplies and divides two numbers.",
    "content_type": "application/json",
    "PumpMessage.content_type": "application/xml",
    "description": "Summarize the report",
    "error": None,
    "TaskFailureRequest.error": "the report is empty",
    "example": None,
    "faults": {},
    "handle": "tmux/trunkline/research-1",
    "handler": "connectors.sample_organism.calculator:calculate",
    "host": "worker-1",
    "image": "trunkline/echo",
    "kind": "calculate",
    "MailboxMessageAnswer.kind": "ask",
    "lag": {"0": 0},
    "last_detail": "build begins",
    "last_event": "started",
    "message": "no job with this id",
    "LeaseFault.message": "the lease has ended, and the message was handed out again",
    "notify": ["end"],
    "namespace": "urn:trunkline:sample:1",
    "options": None,
    "payload": {"text": "hello"},
    "priority": "normal",
    "public_key": _PUBLIC_KEY,
    "reason": "no longer needed",
    "AuditEntry.reason": None,
    "ErrorAnswer.reason": "not_found",
    "EventAnswer.reason": None,
    "LeaseFault.reason": "illegal_transition",
    "SessionAnswer.reason": None,
    "SettleResult.reason": None,
    "result": {"summary": "All is well."},
    "root_tag": "calculate",
    "secrets": ["TRUNKLINE_AGENT_TOKEN"],
    "task": "Translate messages",
    "type": "ask",
    "ListenerAnswer.type": "handler",
    "url": "http://127.0.0.1:3200",
    "visible_tools": [],
    "xsd": None,
    # Access.
    "GrantAnswer.broker": None,
    "JobShownAnswer.broker": None,
    "ca_certs": "/etc/ssl/certs/broker.pem",
    "certfile": None,
    "keyfile": None,
    "inbox": "python/mqtt/agents/echo/inbox",
    "outbox": "python/mqtt/agents/echo/outbox",
    "prefix": "python/mqtt/agents",
    "password": _ONCE,
    "sealed_password": None,
    "secret": _ONCE,
    "token": _ONCE,
    "username": "agent-echo",
    # Numbers.
    "attempt": 1,
    "attempts": 1,
    "cleared": 3,
    "concurrency": 4,
    "events": 1,
    "expiry": 1_769_864_400_250,
    "free": 4,
    "issued": 1_769_860_800_250,
    "jobs_ended": 2,
    "last_seq": 1,
    "lease": 60,
    "left": 0,
    "limit": 100,
    "messages": 0,
    "overlap_s": 3600,
    "per_minute": None,
    "port": None,
    "position": [2, 4711],
    "recipients": 3,
    "released": 0,
    "secret_rotations": None,
    "seq": 1,
    "suspects": 0,
    "timeout_ms": 5000,
    "tokens_per_minute": None,
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
