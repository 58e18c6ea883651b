"""The tokens of tasks (HH-02): a UUID that follows from the master key and the task, and is kept nowhere."""

from __future__ import annotations

import uuid

from schemas.sealing import Keyring


def task_token(keyring: Keyring, task_id: str) -> str:
    """The token of a task: 122 bits, the same each time, unknown to whoever has no master key."""
    return str(uuid.UUID(bytes=keyring.derive(f"task-token/{task_id}")[:16], version=4))
