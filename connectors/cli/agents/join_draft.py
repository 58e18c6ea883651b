"""The unfinished state of `trunkline agents join --credentials FILE`, in a hidden file beside FILE.

The gateway shows a token or a secret once. So the ids of the requests and the agent's key are on the disk
before the first request, and each answer before the next one. A command that broke off goes on from there.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any, Final

from trunkline_agent.errors import UsageError

_LIMIT_BYTES: Final = 1_000_000


class JoinDraft:
    """The draft of an unfinished join of one agent. Each change is on the disk when its method returns.

    Raises UsageError if the draft of another agent is there, or if the file cannot be read or written.

    Args:
        target: The credentials file that the join makes.
        name: The agent.
        run: The idempotency key of the whole join, None for a new one. A draft that is there keeps its own.

    Attributes:
        is_resumed: Whether an earlier command has left the draft.
        found: The answers of the doors, by door.
    """

    def __init__(self, target: Path, name: str, run: str | None) -> None:
        self.path = target.with_name(f".{target.name}.joining")
        kept = self._read()
        self.is_resumed = kept is not None
        state: dict[str, Any] = {"name": name, "run": run or str(uuid.uuid4()), "found": {}}
        state.update(kept or {})
        if state.get("name") != name:
            raise UsageError(
                f"{self.path} is of an unfinished join of {state.get('name')!r}: finish that one, or remove "
                "the file"
            )
        self._run = str(state["run"])
        self._name = name
        self.private_key: str | None = state.get("private_key")
        self.found: dict[str, dict[str, Any]] = state["found"]

    def request_id(self, door: str) -> str:
        """Return the idempotency key of the request for a door: the same one in each command that goes on."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"trunkline:agents/join/{self._run}/{door}"))

    def put(self, door: str, answer: dict[str, Any]) -> None:
        """Store the answer of a door."""
        self.found[door] = answer
        self.save()

    def save(self) -> None:
        """Write the draft to its file, with mode 0600, in one step."""
        state = {"name": self._name, "run": self._run, "private_key": self.private_key, "found": self.found}
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise UsageError(f"--credentials: cannot write {self.path}: {error.strerror}") from None

    def delete(self) -> None:
        """Delete the draft's file, because the credentials file has everything or nothing was obtained."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        try:
            with self.path.open("rb") as file:
                state = json.loads(file.read(_LIMIT_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"--credentials: cannot read {self.path}: {type(error).__name__}") from None
        if not isinstance(state, dict) or not isinstance(state.get("found"), dict) or "run" not in state:
            raise UsageError(f"--credentials: {self.path} is no unfinished join; remove it")
        return state
