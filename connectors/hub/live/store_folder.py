"""The folder of a gateway's local store: its lock, and the deletion of a store that cannot be used.

The file `unproven` is in the folder from the start until the gateway has written to the store once, or has
closed it. A start that finds it deletes the store: a damaged page may have ended the process before (SIGBUS).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from schemas.state_store.gateway_store import GatewayStore
from schemas.state_store.local_store import StoreDamaged
from trunkline_agent.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

_LOCK: Final = "lock"
_UNPROVEN: Final = "unproven"
_STORE: Final = "store"


class StoreFolder:
    """A folder with the local store of one live view, which is created. One process at a time may have it.

    Args:
        folder: The folder. None: a temporary one, which `close` deletes.

    Raises:
        TrunklineError: Another process has the folder, or it cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._is_temporary = folder is None
        self._lock_fd = -1
        self._is_proven = False
        try:
            self.path = Path(tempfile.mkdtemp(prefix="trunkline-live-")) if folder is None else folder
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise TrunklineError(
                f"another gateway uses the state store {folder}: give each gateway of this machine its own "
                "gateway.port, or its own storage.state"
            ) from None
        except OSError as error:
            raise TrunklineError(f"the state store {folder} cannot be created: {error}") from error

    def open(self) -> GatewayStore:
        """Open the store. A store that cannot be used is deleted first. Call `prove` when it has been used."""
        unproven = self.path / _UNPROVEN
        if unproven.exists():
            self.discard("the gateway ended before it had used the store")
        unproven.touch()
        try:
            return GatewayStore(self.path / _STORE)
        except StoreDamaged as error:
            self.discard(str(error))
            return GatewayStore(self.path / _STORE)

    def open_new(self) -> GatewayStore:
        """Delete the store, which must be closed, and open an empty one whose transactions are not synced."""
        self._delete()
        return GatewayStore(self.path / _STORE, is_synced=False)

    def open_loaded(self) -> GatewayStore:
        """Open the store again that was filled after `open_new`, and closed."""
        return GatewayStore(self.path / _STORE)

    def prove(self) -> None:
        """Note that the store has been read and written, so that the next start may use it."""
        if not self._is_proven:
            (self.path / _UNPROVEN).unlink(missing_ok=True)
            self._is_proven = True

    def discard(self, why: str) -> None:
        """Delete the store with a line in the log. If it is open, the open files stay usable until `close`."""
        log.warning("state_store_discarded", folder=str(self.path), why=why)
        self._delete()

    def close(self) -> None:
        """Release the folder, and delete it if it is temporary. Close the store before."""
        if self._lock_fd >= 0:
            # Damage that ends a process (SIGBUS) has not ended this one.
            with suppress(OSError):
                (self.path / _UNPROVEN).unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def _delete(self) -> None:
        shutil.rmtree(self.path / _STORE, ignore_errors=True)
