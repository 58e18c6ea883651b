"""Keeps the audit chain for good, and anchors it: what the ledger's commits carry goes into the chain file.

Reads: the commits of the ledger.
Owns: the chain file, the file of anchors, and the key that signs them.
Guarantees: each commit's entry is in the chain file once, in order; Delta's log is not cleaned of one that is
not. No micro-batch waits for it. It judges nothing: `./trunkline audit verify` does.
On restart: goes on after the file's last line, which a crash may have left half written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

from deltalake import DeltaTable

from schemas.integrity.audit_anchors import ensure_anchor_key, public_pem, sign_statement, statement_of
from schemas.integrity.audit_chain import ChainLine, has_commit, last_in_file, line_in_commit, lines_in_log
from schemas.integrity.audit_files import anchor_key_file, anchor_public_key_file, anchors_file, chain_file
from schemas.keys.first_file import make_first
from schemas.settings.settings import Settings
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER

_POLL_S: Final = 0.5
_AFTER_A_FAILURE_S: Final = 10.0


class AuditTrail:
    """The chain file and the anchors of the ledger that the settings name, which must be there."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        path = settings.table_path(LEDGER)
        self.path = chain_file(settings, str(DeltaTable(path).metadata().id))
        self._storage = table_storage(path)
        self._last: ChainLine | None = None
        self._size = -1
        self._seen: int | None = None
        self._anchored = 0
        self._anchored_at = -float("inf")

    def catch_up(self) -> None:
        """Write down all entries that the log has and the file has not, whatever is missing between."""
        self._look()
        found = lines_in_log(self._storage, -1 if self._last is None else self._last.version)
        self._append(found.lines)
        self._seen = found.version

    def follow(self) -> None:
        """Write down the entries of the commits that came since the last call. Costs one look at the log."""
        if self._seen is None:
            self.catch_up()
            return
        found, version = [], self._seen
        while has_commit(self._storage, version + 1):
            version += 1
            line = line_in_commit(self._storage, version)
            if line is not None:
                found.append(line)
        self._append(found)
        self._seen = version

    def anchor(self, *, at_once: bool = False) -> bool:
        """Sign how far the chain is, if it has grown and it is time; returns whether it did."""
        due = time.monotonic() - self._anchored_at >= self._settings.audit.anchor_interval_s
        if self._last is None or self._last.entry.number < self._anchored or not (due or at_once):
            return False
        entry = self._last.entry
        key = ensure_anchor_key(anchor_key_file(self._settings))
        _add_public_key(anchor_public_key_file(self._settings), public_pem(key.public_key()))
        statement = statement_of(entry, round(time.time() * 1_000_000))
        _append_line(anchors_file(self._settings), sign_statement(statement, key).text())
        self._anchored, self._anchored_at = entry.number + 1, time.monotonic()
        return True

    def _look(self) -> None:
        """Read the file's end, unless it is as this left it."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            self._last, self._size = last_in_file(self.path), size

    def _append(self, lines: list[ChainLine]) -> None:
        if not lines:
            return
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            # Maintenance does this in another thread.
            fcntl.flock(file, fcntl.LOCK_EX)
            self._look()
            after = -1 if self._last is None else self._last.version
            wanted = [line for line in lines if line.version > after]
            if not wanted:
                return
            # What was being written at a crash: its entry is in the log.
            file.truncate(_whole_bytes(self.path))
            file.write(b"".join(line.text() for line in wanted))
            file.flush()
            os.fsync(file.fileno())
            self._last, self._size = wanted[-1], os.fstat(file.fileno()).st_size
        if is_new:
            _sync_folder(self.path.parent)


def _add_public_key(path: Path, pem: str) -> None:
    """Keep the public keys of all keys that have signed, the first one first."""
    if not path.exists():
        make_first(path, pem)
    if pem not in path.read_text(encoding="ascii"):
        _append_line(path, pem.encode("ascii"))


def _whole_bytes(path: Path) -> int:
    """The size of a file without a last line that has no end."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - 4096)
            file.seek(begin)
            at = file.read(end - begin).rfind(b"\n")
            if at >= 0:
                return begin + at + 1
            end = begin
    return 0


def _append_line(path: Path, line: bytes) -> None:
    """Append to a file that may let nobody do more than that."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        # A line that a full disk has cut must not take this one with it.
        is_whole = is_new or _whole_bytes(path) == path.stat().st_size
        text = line if is_whole else b"\n" + line
        written = os.write(file, text)
        os.fsync(file)
        if written < len(text):
            raise OSError(errno.ENOSPC, f"only {written} of {len(text)} bytes could be written", str(path))
    finally:
        os.close(file)
    if is_new:
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class AuditThread:
    """Follows the ledger and anchors the chain on a thread of its own; `stop` does both once more."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit_trail", daemon=True)

    def start(self) -> None:
        """Start, once the ledger is there."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it, after the last micro-batch has been anchored."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        trail: AuditTrail | None = None
        pause, stopping = 0.0, False
        while not stopping:
            stopping = self._stopping.wait(pause)
            pause = _POLL_S
            try:
                trail = trail or AuditTrail(self._settings)
                trail.follow()
                trail.anchor(at_once=stopping)
            except Exception as error:  # noqa: BLE001  the streams matter more; it is tried again
                pause = _AFTER_A_FAILURE_S
                trail = None
                print(f"audit_trail: {type(error).__name__}: {error}", file=sys.stderr)
