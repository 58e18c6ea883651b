"""Parts that the programs of the jobs share: background threads, exit codes, and who may write the tables.

One process at a time writes ledger and views, from whatever machine. On one machine a lock shows it at once.
Across machines, a process claims the ledger when it starts: it writes its name into a property of the table.
Delta refuses each commit of a writer that has read the table before its properties changed. So a process that
stood still while another one took over fails at its next commit, finds the claim, and ends. View tables get the
claim, too, if the process before may still write them: after the ledger, so that who opens them and then finds
the ledger still his own cannot commit to them after a claim (decision 0029).

A sign of life is a number that rises, in a small object beside the tables. A starting process watches it for
`spark.silent_after_s`. No clocks are compared.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from schemas.settings.settings import Settings, SettingsError
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.tables.delta_files import reason_of, table_storage
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import read_progress
from trunkline_agent.errors import NotFound, Refused, TrunklineError


class BackgroundThread:
    """A daemon thread that runs a subclass's `_run` from `start` until `stop`.

    `_run` must return soon after the event `_stopping` is set. A thread cannot be started twice.
    """

    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and return at once."""
        self._thread.start()

    def stop(self, timeout_s: float | None = 10.0) -> None:
        """Ask the thread to end after its current work, and wait until it has ended.

        It may be called before `start` and more than once.

        Args:
            timeout_s: Wait at most this many seconds, then return although the thread still runs. None: no
                limit.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        raise NotImplementedError


def exit_code_of(program: str, action: Callable[[], int]) -> int:
    """Run `action`, the body of a program, and return the program's exit code.

    The code is the value that `action` returns. If `action` raises SettingsError (code 2) or another
    TrunklineError (its `exit_code`), the error is printed to stderr. Other exceptions are not caught.

    Args:
        program: The name at the beginning of the error message.
        action: The body of the program.
    """
    try:
        return action()
    except (SettingsError, TrunklineError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else error.exit_code


def nobody_else_writes() -> None:
    """Do nothing: the check of a process while no other one can claim the tables."""


@contextmanager
def _machine_lock(settings: Settings) -> Iterator[None]:
    """Hold the lock of this machine's writer. The kernel releases it if the process dies.

    Raises Refused with the pid of the process that holds it. The function does not wait.
    """
    path = settings.data_path / "run" / "views.lock"  # with the pid of its last holder
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise Refused(
                f"process {holder} is writing the view tables; stop it first (./trunkline down)"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def open_ledger(settings: Settings) -> DeltaTable:
    """Open the Delta table `ledger` at its newest version.

    Raises:
        NotFound: There is no such table below `settings.tables_root`.
    """
    path = settings.table_path(LEDGER)
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        raise NotFound(f"there is no ledger at {path}") from None


_WRITER: Final = "trunkline.writer"
_BEAT: Final = "_writer.json"
_BEATS_A_TERM: Final = 6
_LOOK_S: Final = 0.5
_TRIES: Final = 20
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN: Final[dict[str, Any]] = {"boot": "", "ids": "", "host": "unknown", "pid": 0, "started": None}


def writer_of(table: DeltaTable) -> str | None:
    """Return who has claimed the table last, in the version that is loaded, as text; None: nobody."""
    return table.metadata().configuration.get(_WRITER)


def name_of(writer: str | None) -> str:
    """Return the host and the process in the text of a claim, for a message."""
    try:
        place = json.loads(writer or "{}")
        return f"{place['host']}, process {place['pid']}"
    except (ValueError, KeyError, TypeError):
        return "unknown"


def _started(pid: int) -> int | None:
    """Return when the process `pid` started, in clock ticks since the boot (proc(5)); None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _own_place() -> dict[str, Any]:
    """Return where this process runs, so that a later one on the same machine sees whether it has ended."""
    return {
        "host": socket.gethostname(),
        "boot": _BOOT_ID.read_text(encoding="ascii").strip(),
        # Containers of one machine have ids of their own for their processes.
        "ids": str(Path("/proc/self/ns/pid").readlink()),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _has_ended(place: dict[str, Any], own: dict[str, Any]) -> bool:
    """Return whether a process is known to have ended. False: it runs, or ran on another machine."""
    is_here = (place["boot"], place["ids"]) == (own["boot"], own["ids"])
    return is_here and place["started"] is not None and _started(place["pid"]) != place["started"]


class WriterClaim(BackgroundThread):
    """The claim of a process that writes ledger and views, as a context manager.

    Another process can commit to no table that it has read before the claim. So a process that opens tables
    must call `check` after that, and before it writes anything that is no commit.

    Attributes:
        lost: Why this process may not go on: another one has claimed the ledger. None: it may.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__("writer_claim")
        self._term_s = settings.spark.silent_after_s
        self._tables = table_storage(settings.tables_root)
        self._settings = settings
        self._id = uuid.uuid4().hex
        self._place = _own_place()
        self._text = json.dumps({"claim": self._id, **self._place}, sort_keys=True)
        self._number = 0
        self._checking = threading.Lock()
        self._opened = ExitStack()
        self.lost: str | None = None

    def __enter__(self) -> Self:
        """Take the lock of this machine, claim the ledger, and begin to give signs of life.

        If another process may still be writing, this waits for its signs of life, up to
        `spark.silent_after_s` of either process, and says so on stderr.

        Raises:
            Refused: Another process writes the tables. The message says where it runs.
            NotFound: There is no ledger.
            TrunklineError: Disk or object store does not answer.
        """
        try:
            self._enter()
        except (DeltaError, OSError) as error:
            raise TrunklineError(f"{self._settings.tables_root}: {reason_of(error)}") from error
        return self

    def _enter(self) -> None:
        with ExitStack() as opened:
            opened.enter_context(_machine_lock(self._settings))
            self._ledger = open_ledger(self._settings)
            before = self._read_beat()
            is_unsure = before is not None and not _has_ended(before["place"], self._place)
            if before is not None and is_unsure:
                self._watch(before)
            self._ledger.update_incremental()
            self._claim(self._ledger)
            for name in VIEW_TABLES if is_unsure else ():
                path = self._settings.table_path(name)
                if DeltaTable.is_deltatable(path):
                    self._claim(DeltaTable(path), name)
            self._beat()
            # Of two that start at once, the later claim counts.
            self.check()
            opened.callback(self.stop)
            self.start()
            self._opened = opened.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def check(self) -> None:
        """Raise Refused if another process has claimed the ledger since this one did."""
        with self._checking:
            self._ledger.update_incremental()
            if (now := writer_of(self._ledger)) != self._text:
                self.lost = f"another process has taken over ({name_of(now)})"
                raise Refused(self.lost)

    def _run(self) -> None:
        while not self._stopping.wait(self._term_s / _BEATS_A_TERM):
            try:
                self.check()
                if not self._stopping.is_set():
                    self._beat()
            except Refused:
                return
            except Exception as error:  # noqa: BLE001  others see us silent, and the next round tries again
                print(f"writer_claim: {type(error).__name__}: {error}", flush=True)
        if self.lost is None:
            self._unclaim()

    def _unclaim(self) -> None:
        with suppress(OSError):
            found = self._read_beat()
            if found is not None and found["claim"] == self._id:
                self._tables.delete_file(_BEAT)

    def _watch(self, before: dict[str, Any]) -> None:
        """Wait until the process before has given no sign of life for long enough."""
        place, term_s = before["place"], max(self._term_s, before["term_s"])
        print(
            f"writer_claim: process {place['pid']} on {place['host']} may be writing the tables; waiting up to "
            f"{term_s:g} s for a sign of life",
            file=sys.stderr,
            flush=True,
        )
        deadline = time.monotonic() + term_s
        while time.monotonic() < deadline:
            time.sleep(min(_LOOK_S, term_s / _BEATS_A_TERM))
            now = self._read_beat()
            if now is None:
                return
            if (now["claim"], now["number"]) != (before["claim"], before["number"]):
                place = now["place"]
                raise Refused(
                    f"process {place['pid']} on {place['host']} is writing the tables: stop it first, or wait "
                    f"until it has given no sign of life for {term_s:g} s"
                )

    def _claim(self, table: DeltaTable, view: str | None = None) -> None:
        """Write this claim into the properties of a table. Earlier readers of it cannot commit then."""
        for attempt in itertools.count(1):
            # Each commit of this table has the progress of the views.
            more = read_progress(table).metadata() if view == STREAM_ENTRIES else {}
            try:
                table.alter.set_table_properties(
                    {_WRITER: self._text},
                    raise_if_not_exists=False,
                    commit_properties=CommitProperties(more, max_commit_retries=0),
                    # Old commits may have entries of the audit chain that are nowhere else yet.
                    post_commithook_properties=PostCommitHookProperties(
                        create_checkpoint=False, cleanup_expired_logs=False
                    ),
                )
            except CommitFailedError:
                if attempt == _TRIES:
                    raise
                table.update_incremental()
            else:
                break

    def _beat(self) -> None:
        self._number += 1
        sign = {"claim": self._id, "number": self._number, "term_s": self._term_s, "place": self._place}
        # An object is there at once with all it has. A file is not.
        draft = _BEAT if "://" in self._settings.tables_root else f"{_BEAT}.{self._id}"
        with self._tables.open_output_stream(draft) as stream:
            stream.write(json.dumps(sign).encode())
        if draft != _BEAT:
            self._tables.move(draft, _BEAT)

    def _read_beat(self) -> dict[str, Any] | None:
        """Return the newest sign of life; None: the last writer has ended in order, or there was none.

        One that cannot be read is that of an unknown writer.
        """
        try:
            with self._tables.open_input_stream(_BEAT) as stream:
                found = json.loads(stream.read())
            place = {name: found["place"].get(name, unknown) for name, unknown in _UNKNOWN.items()}
            return {
                "claim": str(found["claim"]),
                "number": int(found["number"]),
                "term_s": float(found.get("term_s", 0)),
                "place": place | {"pid": int(place["pid"])},
            }
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError):
            return {"claim": "", "number": 0, "term_s": 0.0, "place": _UNKNOWN}
