"""What an agent over MQTT keeps on disk (JE-26): the last seq and the messages that were not confirmed.

One JSON file an agent, 0600, replaced as a whole and fsynced before anything is sent; beside it a lock file, so
that two processes never take the same seq. With another secret, after a new registration, it begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from connectors.agent_sdk.locked_state import LockedState
from schemas.errors import UsageError
from schemas.wire.ids import is_name
from schemas.wire.strict_json import INT_MAX


class PendingWord(msgspec.Struct, frozen=True):
    """A message that has its seq and its bytes, and no confirmation yet."""

    seq: int
    payload: str

    @property
    def wire_bytes(self) -> bytes:
        """What goes on the wire, the same at every attempt."""
        return self.payload.encode("utf-8")


class _State(msgspec.Struct):
    agent_name: str
    secret_sha256: str
    last_seq: int = 0
    outbox: list[PendingWord] = []


class AgentOutbox(LockedState[_State]):
    """The state of one agent, locked while it is open. Use it as a context manager.

    Raises UsageError for a bad name, and what LockedState raises.
    """

    def __init__(self, state_dir: Path, agent_name: str, secret: str, lock_timeout_s: float) -> None:
        if not is_name(agent_name):
            raise UsageError(f"not an agent's name: {agent_name!r}")
        super().__init__(
            state_dir / f"{agent_name}.json",
            _State(agent_name, hashlib.sha256(secret.encode("utf-8")).hexdigest()),
            lock_timeout_s,
            whose=f"the state of the agent {agent_name}",
            busy="another process has been sending for this agent",
            foreign="register the agent anew and remove it",
        )

    def _load(self) -> _State:
        found = super()._load()
        return found if found.secret_sha256 == self._fresh.secret_sha256 else self._fresh

    @property
    def pending(self) -> tuple[PendingWord, ...]:
        """What was not confirmed, in the order of seq."""
        return tuple(self._state.outbox)

    def add(self, build: Callable[[int], bytes]) -> PendingWord:
        """Take the next seq for the bytes that `build(seq)` makes. On disk when this returns."""
        seq = self._state.last_seq + 1
        if seq > INT_MAX:
            raise UsageError("this agent has used up its sequence numbers")
        word = PendingWord(seq, build(seq).decode("utf-8"))
        self._state.last_seq = seq
        self._state.outbox.append(word)
        self._save()
        return word

    def confirm(self, word: PendingWord) -> None:
        """Take a delivered message out."""
        self._state.outbox.remove(word)
        self._save()
