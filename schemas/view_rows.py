"""The rows of the views: the latest state of what a record changed, typed. The fold makes them.

A `Moment` is Kafka's append time in microseconds since 1970 UTC.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

Moment = Annotated[int, msgspec.Meta(description="microseconds since 1970 UTC")]

REGISTRY_JOBS: Final = "registry_jobs"
REGISTRY_SESSIONS: Final = "registry_sessions"
REGISTRY_PRINCIPALS: Final = "registry_principals"
MAILBOX_VIEW: Final = "mailbox"


class JobRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_jobs`. `session_wanted` may alone pick it; `session` has it.
    `ended_by`: CloudEvents id of the record that ended the job, the cause of what follows from it.
    """

    job_id: str
    status: str
    description: str
    session_wanted: str | None
    session: str | None
    registered_by: str
    registered_at: Moment
    picked_at: Moment | None
    started_at: Moment | None
    ended_at: Moment | None
    ended_by: str | None
    last_seq: int
    last_event: str | None
    last_detail: str | None
    events: int


class SessionRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_sessions`. `handle` says what runs on `host`: `tmux/<socket>/<name>` or
    `process/<pid>/<start time>`, None for a session that only its name is known of. `for_job`: the session
    was made for this job and ends with it; `job_id`: the job that it hosts now.
    """

    session: str
    status: str
    description: str
    host: str | None
    handle: str | None
    for_job: str | None
    job_id: str | None
    jobs_ended: int
    created_by: str
    created_at: Moment
    stopped_at: Moment | None
    reason: str | None
    capture_id: str | None


class PrincipalRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `registry_principals`; of the token only its SHA-256 (hex) is known."""

    principal: str
    role: str
    status: str
    token_sha256: str
    added_by: str
    added_at: Moment
    revoked_at: Moment | None


class MessageRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `mailbox`: one message for one recipient. `sent_at` and `expires_at` as the sender says."""

    realm: str
    recipient: str
    message_id: str
    status: str
    sender: str
    from_verified: bool
    kind: str
    priority: str
    body: str
    content_type: str
    in_reply_to: str | None
    thread: str | None
    broadcast_id: str | None
    sent_at: str | None
    expires_at: str | None
    posted_at: Moment


ViewRow = JobRow | SessionRow | PrincipalRow | MessageRow
