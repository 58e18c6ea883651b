"""The life cycles of a job (JE-08), a session (JE-14), a task (HH-04) and a container (HH-05), drawn once:
fold, views, commands and docs use these words.

pending --> running --> completed
   |           |------> error (a task: failed)
   |           `------> cancelled
   `-----------------> cancelled
"""

from __future__ import annotations

from typing import Final

PENDING: Final = "pending"
RUNNING: Final = "running"
COMPLETED: Final = "completed"
ERROR: Final = "error"
CANCELLED: Final = "cancelled"

JOB_STATES: Final = (PENDING, RUNNING, COMPLETED, ERROR, CANCELLED)
JOB_TERMINAL: Final = frozenset({COMPLETED, ERROR, CANCELLED})
JOB_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PENDING: frozenset({RUNNING, CANCELLED}),
    RUNNING: frozenset({COMPLETED, ERROR, CANCELLED}),
    COMPLETED: frozenset(),
    ERROR: frozenset(),
    CANCELLED: frozenset(),
}

# The life cycle of an agent session (JE-14). Stopped: kept for resume; archived: released, left alive;
# terminated: gone, for ever.
STOPPED: Final = "stopped"
ARCHIVED: Final = "archived"
TERMINATED: Final = "terminated"

SESSION_STATES: Final = (RUNNING, STOPPED, ARCHIVED, TERMINATED)
SESSION_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    RUNNING: frozenset({STOPPED, ARCHIVED, TERMINATED}),
    STOPPED: frozenset({RUNNING, ARCHIVED, TERMINATED}),
    ARCHIVED: frozenset({RUNNING, TERMINATED}),
    TERMINATED: frozenset(),
}

# The life cycle of a task (HH-04).
FAILED: Final = "failed"

TASK_STATES: Final = (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED)
TASK_TERMINAL: Final = frozenset({COMPLETED, FAILED, CANCELLED})
TASK_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PENDING: frozenset({RUNNING, CANCELLED}),
    RUNNING: frozenset({COMPLETED, FAILED, CANCELLED}),
    COMPLETED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}

# What a participant says of itself (AM-06); stopped is said of it, and it may join again.
INITIALIZING: Final = "initializing"
IDLE: Final = "idle"
WORKING: Final = "working"
BLOCKED: Final = "blocked"

PARTICIPANT_STATES: Final = (INITIALIZING, IDLE, WORKING, BLOCKED, STOPPED)

# The life cycle of what a launcher makes for a task (HH-05). Recycling, by failure or stop, is open from each
# state before it; recycled is the end.
PROVISIONING: Final = "provisioning"
CONFIGURING: Final = "configuring"
STARTING: Final = "starting"
MONITORING: Final = "monitoring"
RECYCLING: Final = "recycling"
RECYCLED: Final = "recycled"

CONTAINER_STATES: Final = (PROVISIONING, CONFIGURING, STARTING, RUNNING, MONITORING, RECYCLING, RECYCLED)
CONTAINER_TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    PROVISIONING: frozenset({CONFIGURING, RECYCLING}),
    CONFIGURING: frozenset({STARTING, RECYCLING}),
    STARTING: frozenset({RUNNING, RECYCLING}),
    RUNNING: frozenset({MONITORING, RECYCLING}),
    MONITORING: frozenset({RECYCLING}),
    RECYCLING: frozenset({RECYCLED}),
    RECYCLED: frozenset(),
}
