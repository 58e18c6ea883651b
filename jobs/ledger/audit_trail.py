"""The audit trail: copies the audit chain from the ledger's commits into the chain file, and anchors it.

Reads: the commits of the ledger.
Owns: the chain file, the file of anchors, and the key that signs them.
Guarantees: each commit's entry is in the chain file once, in order. It stays in Delta's log until then. No
micro-batch waits for it. The audit trail checks nothing: `./trunkline audit verify` does.
On restart: continues after the file's last line, which a crash may have left incomplete.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import Final

from deltalake import DeltaTable

from jobs.driver.programs import BackgroundThread
from schemas.integrity.audit_anchors import (
    anchor_key_file,
    anchor_public_key_file,
    anchors_file,
    chain_file,
    ensure_anchor_key,
    sign_statement,
    statement_of,
)
from schemas.integrity.audit_chain import ChainLine, has_commit, last_in_file, line_in_commit, lines_in_log
from schemas.integrity.line_objects import ObjectLines
from schemas.settings.settings import Settings
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER
from trunkline_agent.mcp.signing import public_key_pem
from trunkline_agent.private_files import make_first

_POLL_S: Final = 0.5
_OBJECTS_EVERY_S: Final = 10.0
_AFTER_A_FAILURE_S: Final = 10.0


class AuditTrail:
    """The writer of the chain file and the anchors file of the ledger that the settings name.

    The ledger must exist. Use an object in one thread only. Several objects may append to the chain file at the
    same time, because each locks it.

    Attributes:
        path: The chain file, or its place in an object store.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        path = settings.table_path(LEDGER)
        self.path = chain_file(settings, str(DeltaTable(path).metadata().id))
        self._storage = table_storage(path)
        self._last: ChainLine | None = None
        self._size: int | None = None
        self._waiting: list[ChainLine] = []
        self._written_at = -float("inf")
        self._seen: int | None = None
        self._anchored = 0
        self._anchored_at = -float("inf")

    def catch_up(self) -> None:
        """Copy all entries of the audit chain that the chain file lacks from the ledger's Delta log into it.

        Delta removes old commits from its log, and the chain file keeps all entries. If some entries are
        already removed, the newer ones are copied all the same.
        """
        self._waiting.clear()
        self._look()
        found = lines_in_log(self._storage, -1 if self._last is None else self._last.version)
        self._append(found.lines)
        self._seen = found.version

    def merge(self) -> None:
        """Join many small objects of the chain to one. Only maintenance may call it. A file is not changed."""
        if isinstance(self.path, ObjectLines):
            self.path.merge()

    def follow(self) -> None:
        """Copy the audit chain's entries of the ledger's new commits into the chain file.

        The chain file keeps all entries. The first call copies all entries that it lacks. Later calls only read
        the commits since the last one. In an object store, each copy is an object, so the entries of ten
        seconds are copied at once.
        """
        if self._seen is None:
            self.catch_up()
            return
        found, version = self._waiting, self._seen
        while has_commit(self._storage, version + 1):
            version += 1
            line = line_in_commit(self._storage, version)
            if line is not None:
                found.append(line)
        self._seen = version
        if isinstance(self.path, Path) or time.monotonic() - self._written_at >= _OBJECTS_EVERY_S:
            self._write()

    def _write(self) -> None:
        self._append(self._waiting)
        self._waiting, self._written_at = [], time.monotonic()

    def anchor(self, *, at_once: bool = False) -> bool:
        """Sign the audit chain's newest entry and append it to the anchors file, if an anchor is due.

        An anchor is due if the chain has grown since this object's last anchor and `audit.anchor_interval_s`
        has passed. If there is no signing key, it is made. The public key is stored beside it.

        Args:
            at_once: Anchor a grown chain although the interval has not passed.

        Returns:
            True: an anchor was appended. False: none was due, or `catch_up` and `follow` have found no entry.
        """
        if at_once:
            self._write()
        due = time.monotonic() - self._anchored_at >= self._settings.audit.anchor_interval_s
        if self._last is None or self._last.entry.number < self._anchored or not (due or at_once):
            return False
        entry = self._last.entry
        key = ensure_anchor_key(anchor_key_file(self._settings))
        _add_public_key(anchor_public_key_file(self._settings), public_key_pem(key.public_key()))
        statement = statement_of(entry, round(time.time() * 1_000_000))
        place, line = anchors_file(self._settings), sign_statement(statement, key).text()
        if isinstance(place, ObjectLines):
            place.append(statement.time_us, statement.time_us, line)
        else:
            _append_line(place, line)
        self._anchored, self._anchored_at = entry.number + 1, time.monotonic()
        return True

    def _look(self) -> None:
        """Read the last entry, unless it is known: the file is unchanged, or objects were read before."""
        size = 0
        if isinstance(self.path, Path):
            size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            self._last, self._size = last_in_file(self.path), size

    def _append(self, lines: list[ChainLine]) -> None:
        if isinstance(self.path, ObjectLines):
            # Another thread may write the same entries: a reader passes over what comes again.
            if wanted := self._lacking(lines):
                texts = b"".join(line.text() for line in wanted)
                self.path.append(wanted[0].version, wanted[-1].version, texts)
                self._last = wanted[-1]
            return
        if not lines:
            return
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            # Maintenance also appends, in another thread.
            fcntl.flock(file, fcntl.LOCK_EX)
            self._look()
            if not (wanted := self._lacking(lines)):
                return
            # Drop a line that a crash has cut; its entry is in the log.
            file.truncate(_whole_bytes(self.path))
            file.write(b"".join(line.text() for line in wanted))
            file.flush()
            os.fsync(file.fileno())
            self._last, self._size = wanted[-1], os.fstat(file.fileno()).st_size
        if is_new:
            _sync_folder(self.path.parent)

    def _lacking(self, lines: list[ChainLine]) -> list[ChainLine]:
        return [line for line in lines if self._last is None or line.version > self._last.version]


def _add_public_key(path: Path, pem: str) -> None:
    """Add the public key to those of all keys that have signed, in order of their first use."""
    if not path.exists():
        make_first(path, pem)
    if pem not in path.read_text(encoding="ascii"):
        _append_line(path, pem.encode("ascii"))


def _whole_bytes(path: Path) -> int:
    """Return the size of a file without an incomplete last line."""
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
    """Append a line to a file that may be append-only."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        # A line that a full disk has cut must not be joined with this one.
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


class AuditThread(BackgroundThread):
    """A thread that copies the ledger's audit chain into the chain file and anchors it, until `stop`.

    It looks for new commits twice a second. At its end it copies and anchors once more. Errors are printed to
    stderr, and the thread tries again after ten seconds. The ledger must exist before `start`.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__("audit_trail")
        self._settings = settings

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
            except Exception as error:  # noqa: BLE001  the streams go on; the next round tries again
                pause = _AFTER_A_FAILURE_S
                trail = None
                print(f"audit_trail: {type(error).__name__}: {error}", file=sys.stderr)
