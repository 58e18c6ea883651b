"""The credentials of a task: its token (HH-02), and the private key of the agent that runs for it (AM-09)."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.principal.principals import token_hash
from trunkline_agent.mcp.signing import load_private_key, new_key_pair, public_pem


def task_token(keyring: Keyring, task_id: str, token_id: str | None = None) -> str:
    """Return the token with which the agent of a task authenticates itself, a UUID with 122 secret bits.

    It is derived from a master key and the task's id, so it is stored nowhere, and repeated calls return the
    same token. If no master key yields a token with `token_id`, the token of the active key is returned.

    Args:
        keyring: The master keys.
        task_id: The id of the task.
        token_id: The first digits of the hash of the task's existing token. That token may come from an earlier
            master key, so each key is tried. None for a new task: the active key is used.
    """
    for one in keyring.each() if token_id is not None else ():
        token = _derived(one, task_id)
        if token_hash(token).startswith(token_id or ""):
            return token
    return _derived(keyring, task_id)


def _derived(keyring: Keyring, task_id: str) -> str:
    return str(uuid.UUID(bytes=keyring.derive(f"task-token/{task_id}")[:16], version=4))


class AgentKeyFiles:
    """The private keys of agents that the gateway starts: one file with mode 0600 for each task.

    The files are in the folder `agent_mcp.keys_path`.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.agent_keys_path

    def make(self, task_id: str) -> tuple[Path, str]:
        """Create a key pair for a task's agent, and write the private key to the task's file.

        If the file exists, because an earlier launch was interrupted, nothing is written, and its key is
        returned.

        Returns:
            The path of the private key's file, and the public key in PEM.

        Raises:
            OSError: The file cannot be read or written.
            ValueError: The existing file is no private key.
        """
        path = self.path_of(task_id)
        if path.exists():
            return path, public_pem(load_private_key(path.read_bytes()))
        private, public = new_key_pair()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._folder / f".{task_id}.{os.getpid()}"
        # Other users must not read the file, not even while it is written.
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(private)
        draft.replace(path)
        return path, public

    def path_of(self, task_id: str) -> Path:
        """Return the absolute path of the private key's file for a task's agent. The file need not exist."""
        return (self._folder / f"{task_id}.pem").absolute()

    def remove(self, task_id: str) -> None:
        """Delete the file with the private key of a task's agent. Without such a file, nothing happens."""
        self.path_of(task_id).unlink(missing_ok=True)
