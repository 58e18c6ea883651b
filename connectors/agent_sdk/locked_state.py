"""A small state on disk that one process at a time changes: locked while open, replaced as a whole, fsynced.

Beside the file lies a lock file, and while it is written a draft; all are 0600.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import msgspec

from schemas.errors import TrunklineError

State = TypeVar("State", bound=msgspec.Struct)
_LOCK_TICK_S: Final = 0.02


class OutboxBusyError(TrunklineError):
    """Another process has the state and did not finish in time."""


class LockedState(Generic[State]):
    """The state in one file; use it as a context manager. `fresh` is what it is before there is a file.

    In errors `whose` names it, `busy` says what another process is doing, and `foreign` what to do about a file
    that is none of ours.

    Raises OutboxBusyError after `lock_timeout_s` seconds, TrunklineError when the file cannot be read or
    written.
    """

    def __init__(
        self, path: Path, fresh: State, lock_timeout_s: float, *, whose: str, busy: str, foreign: str
    ) -> None:
        self._path = path
        self._fresh = fresh
        self._lock_timeout_s = lock_timeout_s
        self._whose, self._busy, self._foreign = whose, busy, foreign
        self._lock_fd = -1
        self._state = fresh

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise TrunklineError(f"cannot keep {self._whose}: {error}") from error
        try:
            self._lock()
            self._state = self._load()
        except BaseException:
            os.close(self._lock_fd)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock_fd)  # which also unlocks

    def _is_own(self, state: State) -> bool:
        """Whether what was read is the state of whom the file is named by."""
        return True

    def _save(self) -> None:
        """Write the state. On disk when this returns."""
        draft = self._path.with_suffix(".draft")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(self._state))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
            folder_fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder_fd)
            finally:
                os.close(folder_fd)
        except OSError as error:
            raise TrunklineError(f"cannot write {self._whose}: {error}") from error

    def _lock(self) -> None:
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutboxBusyError(
                        f"{self._busy} for more than {self._lock_timeout_s:.0f} s; wait for it or end it"
                    ) from None
                time.sleep(_LOCK_TICK_S)
            else:
                return

    def _load(self) -> State:
        try:
            state = msgspec.json.decode(self._path.read_bytes(), type=type(self._fresh))
        except FileNotFoundError:
            return self._fresh
        except OSError as error:
            raise TrunklineError(f"cannot read {self._whose}: {error}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            state = None
        if state is None or not self._is_own(state):
            raise TrunklineError(
                f"{self._path} is not {self._whose}; it is written as a whole, so somebody else changed it: "
                f"restore it, or {self._foreign}"
            )
        return state
