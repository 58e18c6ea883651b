"""The private keys of agents that were spawned here (AM-09): 0600 files that only their agents are told of."""

from __future__ import annotations

import os
from pathlib import Path

from schemas.settings.settings import Settings
from schemas.streams.agents.agent_signing import load_private_key, new_key_pair, public_pem


class AgentKeyFiles:
    """One file for each task, in `agent_mcp.keys_path`."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.agent_keys_path

    def make(self, task_id: str) -> tuple[Path, str]:
        """Make a key pair, or take that of a launch that broke off; returns where the private key lies, and
        the public key as PEM. Raises OSError.
        """
        path = self.path_of(task_id)
        if path.exists():
            return path, public_pem(load_private_key(path.read_bytes()))
        private, public = new_key_pair()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._folder / f".{task_id}.{os.getpid()}"
        # Never readable for others, not even while it is written.
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(private)
        draft.replace(path)
        return path, public

    def path_of(self, task_id: str) -> Path:
        """Where the private key for a task lies while its agent lives."""
        return (self._folder / f"{task_id}.pem").absolute()

    def remove(self, task_id: str) -> None:
        """Delete the private key for a task; one that is gone is no error."""
        self.path_of(task_id).unlink(missing_ok=True)
