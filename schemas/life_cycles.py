"""The life cycles of a job (JE-08) and of a session (JE-14), drawn once: fold, views, commands and docs use
these words.

pending --> running --> completed
   |           |------> error
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
