"""The life cycle of a job (JE-08), drawn once: fold, views, commands and docs use these words.

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
