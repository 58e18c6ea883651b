"""The tokens of tasks (HH-02): a UUID that follows from the master key and the task, and is kept nowhere."""

from __future__ import annotations

import uuid

from schemas.keys.sealing import Keyring
from schemas.streams.principal.principals import token_hash


def task_token(keyring: Keyring, task_id: str, token_id: str | None = None) -> str:
    """The token of a task: 122 bits, the same each time, unknown to whoever has no master key.

    `token_id`: the one that the task has already, perhaps of a master key that was active when it began.
    """
    for one in keyring.each() if token_id is not None else ():
        token = _derived(one, task_id)
        if token_hash(token).startswith(token_id or ""):
            return token
    return _derived(keyring, task_id)


def _derived(keyring: Keyring, task_id: str) -> str:
    return str(uuid.UUID(bytes=keyring.derive(f"task-token/{task_id}")[:16], version=4))
