"""The folder of a gateway's local store, and the thread that writes the live view's changes to it.

The folder has a lock, and a store that cannot be used is deleted. The file `unproven` is in the folder from the
start until the gateway has written to the store once, or has closed it. A start that finds it deletes the
store: a damaged page may have ended the process before (SIGBUS).

The thread writes every five seconds. Delivers: entries, rows and the place in the log up to which the store has
them, in one synced transaction. Acknowledges when: never; no request waits for the store, because the log has
every record. Loses when: the process is killed. The next start reads the records after the store's place from
the log again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import lmdb
import structlog

from connectors.hub.live.live_state import LiveState
from connectors.plumbing.network.rates import Backoff
from schemas.state_store.gateway_store import GatewayStore
from schemas.state_store.local_store import StoreDamaged, StoreMoved
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


T = TypeVar("T")

# A message that is posted and read in this time is written once.
_EVERY_S: Final = 5.0
# After so many changes the thread rests, because all threads of the gateway share one interpreter.
_AT_ONCE: Final = 50
_REST_S: Final = 0.002
# Write earlier, and without rests, if this much waits.
_SOON_RECORDS: Final = 20_000
_SOON_BYTES: Final = 32 * 1024 * 1024
# The view waits while this much waits, and ends if the store cannot be written then.
MOST_RECORDS: Final = 200_000
MOST_BYTES: Final = 256 * 1024 * 1024
MAPPED_MOST: Final = 64 * 1024 * 1024
_STOP_S: Final = 10.0
_STATM: Final = Path("/proc/self/statm")
# LMDB reports these when the file is not as it was written. It reports a full disk as another error.
_DAMAGE: Final = (StoreDamaged, StoreMoved, lmdb.PanicError, lmdb.BadTxnError)


class StoreWriter:
    """A thread that writes the changes of a LiveState to its store.

    Args:
        state: The state.
        store: Its store.
        on_written: Called on the thread after each write.
        on_failure: Called on the thread with the error that ended it: the store is damaged.

    Attributes:
        trouble: The reason why the last write failed, such as a full disk; None after a write that succeeded.
    """

    def __init__(
        self,
        state: LiveState,
        store: GatewayStore,
        on_written: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._state = state
        self._store = store
        self._on_written = on_written
        self._on_failure = on_failure
        self._wake = threading.Event()
        self._closing = False
        self._backoff = Backoff(most_s=10.0)
        self._written = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="live-store", daemon=True)
        self.trouble: str | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def keep_up(self) -> None:
        """Wake the thread if much waits to be written, and wait for it if too much does.

        The live view's thread calls this after it has applied records.

        Raises:
            TrunklineError: The store cannot be written, and the changes do not fit into memory any more.
        """
        records, size = self._state.waiting()
        if records < _SOON_RECORDS and size < _SOON_BYTES:
            return
        # After a failed write the thread tries again when its pause is over.
        if self.trouble is None:
            self._wake.set()
        while records > MOST_RECORDS or size > MOST_BYTES:
            if self._closing or not self._thread.is_alive():
                return
            if self.trouble is not None:
                raise TrunklineError(
                    f"the state store cannot be written ({self.trouble}), and {records} records wait for it: "
                    "free space on its disk, or set storage.state to a folder on another one"
                )
            with self._written:
                self._written.wait(1.0)
            records, size = self._state.waiting()

    def close(self) -> None:
        """Write what waits, and end the thread, within ten seconds."""
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            # The first write comes even if there is nothing to write: it shows that the store is usable.
            is_last, is_first, mapped = False, True, _mapped_bytes()
            while not is_last:
                self._wake.wait(_EVERY_S)
                self._wake.clear()
                is_last = self._closing
                if is_first or self._state.waiting()[0]:
                    self._write()
                is_first = False
                # Pages of the store that were read count as memory of this process, until they are unmapped.
                if _mapped_bytes() > mapped + MAPPED_MOST:
                    self._store.reopen()
        except Exception as error:
            log.exception("state_store_failed")
            self._on_failure(error)
        finally:
            self._notify()

    def _write(self) -> None:
        """Write what waits. Tries again while the disk is full, until `close`."""
        taken, place = self._state.take()
        while True:
            try:
                entries, rows = self._rested(taken.entry_changes()), self._rested(taken.row_changes())
                self._store.advance(self._state.place, place, entries, rows)
                break
            except _DAMAGE:
                raise
            except (lmdb.Error, OSError) as error:
                self.trouble = str(error)
                self._notify()
                if self._backoff.is_to_log(self.trouble):
                    log.error("state_store_not_written", why=self.trouble, records=self._state.waiting()[0])
                if isinstance(error, lmdb.MapFullError):
                    self._store.reopen()  # with room for a larger file
            if self._closing:
                return
            self._wake.wait(self._backoff.next_s())
            self._wake.clear()
        self._state.flushed(taken, place)
        self._backoff.reset()
        self.trouble = None
        self._notify()
        self._on_written()

    def _rested(self, changes: Iterator[T]) -> Iterator[T]:
        for number, change in enumerate(changes, 1):
            yield change
            if number % _AT_ONCE == 0 and not self._closing and self._state.waiting()[0] < _SOON_RECORDS:
                time.sleep(_REST_S)

    def _notify(self) -> None:
        with self._written:
            self._written.notify_all()


def _mapped_bytes() -> int:
    """Return how much of this process's resident memory are pages of files; 0 if the system does not say."""
    try:
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0
