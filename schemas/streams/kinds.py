"""All kinds of streams, and the record types and views that are derived from them.

To add a kind, add a package in this folder and an entry in `KINDS`.
"""

from __future__ import annotations

from typing import Final

from schemas.fold.stream_kind import StreamKind
from schemas.fold.view_rows import Row
from schemas.streams.agents.agent_fold import AGENT_KIND
from schemas.streams.blob.blob_fold import BLOB_KIND
from schemas.streams.container.container_fold import CONTAINER_KIND
from schemas.streams.control.control_fold import CONTROL_KIND
from schemas.streams.job.job_fold import JOB_KIND
from schemas.streams.mailboxes.mailbox_fold import MAILBOX_KIND
from schemas.streams.principal.principals import PRINCIPAL_KIND
from schemas.streams.refused.refusal import REFUSED_KIND
from schemas.streams.schedule.schedule_fold import SCHEDULE_KIND
from schemas.streams.session.session_fold import SESSION_KIND
from schemas.streams.task.task_fold import TASK_KIND
from schemas.streams.thread.threads import THREAD_KIND
from schemas.streams.topic.topic_fold import TOPIC_KIND
from schemas.streams.webhook.webhook_fold import WEBHOOK_KIND

# In the order in which a micro-batch writes their views.
KINDS: Final[dict[str, StreamKind]] = {
    kind.name: kind
    for kind in (
        JOB_KIND,
        SESSION_KIND,
        PRINCIPAL_KIND,
        TASK_KIND,
        AGENT_KIND,
        CONTAINER_KIND,
        CONTROL_KIND,
        THREAD_KIND,
        TOPIC_KIND,
        SCHEDULE_KIND,
        BLOB_KIND,
        WEBHOOK_KIND,
        MAILBOX_KIND,
        REFUSED_KIND,
    )
}
RECORD_TYPES: Final = tuple(record_type for kind in KINDS.values() for record_type in kind.models)

STREAM_ENTRIES: Final = "stream_entries"
# In the order in which a micro-batch writes them. `stream_entries` is written last and records the progress.
VIEWS: Final[dict[str, type[Row]]] = {
    row_type.VIEW: row_type
    for row_types in (
        *(kind.rows for kind in KINDS.values()),
        *(kind.later_rows for kind in KINDS.values()),
    )
    for row_type in row_types
}
VIEW_TABLES: Final = (*VIEWS, STREAM_ENTRIES)
