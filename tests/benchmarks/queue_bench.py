"""How fast the file queue sends and polls, next to SQLite and persist-queue with the same promise.

The promise of all: what a send or a poll has answered for is on the disk (fsync). Sends by one and by eight
processes; a poll of ten new messages after a thousand and after a million old ones. Peers: a table in SQLite
(WAL, synchronous=FULL) with a cursor per consumer, as ours has; and persist-queue's SQLite queue, which has one
reader and gives messages one by one. In turns, so that a busy moment hits all; medians.

    ./trunkline bench queue --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import persistqueue

from connectors.file_queue import Queue
from connectors.file_queue.cursors import write_cursor
from connectors.file_queue.message_record import new_id, stamp, to_line
from connectors.file_queue.session_files import MESSAGES, SessionFolder

BODY = "step 7 of 12 done, reading the index"
SESSION = "bench"
NEW = 10
PROCESSES = 8
SQLITE, PERSIST = "sqlite-wal-full", "persist-queue"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
  id INTEGER PRIMARY KEY, msg_id TEXT, ts TEXT, sender TEXT, recipient TEXT, topic TEXT, body TEXT);
CREATE TABLE IF NOT EXISTS cursors (agent TEXT PRIMARY KEY, last INTEGER);
"""


def say(text: str) -> None:
    """Progress, on stderr: stdout is for the result."""
    print(f"queue: {text}", file=sys.stderr, flush=True)


def opened(folder: Path) -> sqlite3.Connection:
    """The peer's database, with the promise that ours has."""
    found = sqlite3.connect(folder / "peer.db", isolation_level=None, timeout=60)
    found.execute("PRAGMA journal_mode=WAL")
    found.execute("PRAGMA synchronous=FULL")
    found.executescript(_SCHEMA)
    return found


def ours_sends(folder: Path, count: int) -> None:
    """Send with the library."""
    queue = Queue(folder / "ours", fsync=True)
    for _ in range(count):
        queue.send("status", BODY, to="bo", session=SESSION, sender="ann")


def sqlite_sends(folder: Path, count: int) -> None:
    """The same into a table, a transaction each."""
    with closing(opened(folder)) as database:
        for _ in range(count):
            row = (new_id(), stamp(), "ann", "bo", "status", BODY)
            database.execute(
                "INSERT INTO messages (msg_id, ts, sender, recipient, topic, body) VALUES (?,?,?,?,?,?)", row
            )


def persist_sends(folder: Path, count: int) -> None:
    """The same with persist-queue."""
    queue = persistqueue.SQLiteQueue(str(folder / "persist"), auto_commit=True)
    for _ in range(count):
        queue.put({"msg_id": new_id(), "ts": stamp(), "from": "ann", "to": "bo", "body": BODY})


def per_s(send: Callable[[Path, int], None], folder: Path, count: int) -> float:
    """Messages a second of one process."""
    began = time.perf_counter()
    send(folder, count)
    return count / (time.perf_counter() - began)


def per_s_of_many(send: Callable[[Path, int], None], folder: Path, count: int) -> float:
    """Messages a second of eight processes together, begun before the clock is."""
    context = multiprocessing.get_context("fork")
    with context.Pool(PROCESSES) as pool:
        pool.starmap(send, [(folder, 1)] * PROCESSES, chunksize=1)
        began = time.perf_counter()
        pool.starmap(send, [(folder, count)] * PROCESSES, chunksize=1)
        return PROCESSES * count / (time.perf_counter() - began)


def fill_ours(root: Path, old: int) -> None:
    """A session of so many old messages, all of them read by `bo`."""
    with SessionFolder(str(root), SESSION, create=True) as folder:
        fields = {
            "from": "ann",
            "to": "bo",
            "topic": "status",
            "body": BODY,
            "in_reply_to": None,
            "ttl_s": None,
        }
        with (Path(folder.path) / MESSAGES).open("ab") as file:
            for _ in range(old):
                file.write(to_line({"msg_id": new_id(), "ts": stamp(), **fields}))
            file.flush()
            os.fsync(file.fileno())
            write_cursor(folder, "bo", file.tell())


def fill_sqlite(folder: Path, old: int) -> None:
    """The same for the peer."""
    with closing(opened(folder)) as database:
        rows = ((new_id(), stamp(), "ann", "bo", "status", BODY) for _ in range(old))
        database.execute("BEGIN")
        database.executemany(
            "INSERT INTO messages (msg_id, ts, sender, recipient, topic, body) VALUES (?,?,?,?,?,?)", rows
        )
        database.execute("INSERT OR REPLACE INTO cursors SELECT 'bo', max(id) FROM messages")
        database.execute("COMMIT")


def ours_poll(folder: Path) -> int:
    """One poll."""
    return len(Queue(folder / "ours", fsync=True).poll("bo", session=SESSION))


def sqlite_poll(folder: Path) -> int:
    """One poll of the peer: what is after the cursor, and the cursor, in one transaction."""
    with closing(opened(folder)) as database:
        database.execute("BEGIN IMMEDIATE")
        (last,) = database.execute("SELECT last FROM cursors WHERE agent = 'bo'").fetchone() or (0,)
        rows = database.execute(
            "SELECT * FROM messages WHERE id > ? AND recipient IN ('bo', 'all') ORDER BY id", (last,)
        ).fetchall()
        newest = rows[-1][0] if rows else last
        database.execute("INSERT OR REPLACE INTO cursors VALUES ('bo', ?)", (newest,))
        database.execute("COMMIT")
    return len(rows)


def persist_poll(folder: Path) -> int:
    """The same with persist-queue: one by one, each acknowledged by being taken."""
    queue = persistqueue.SQLiteQueue(str(folder / "persist"), auto_commit=True)
    return len([queue.get(block=False) for _ in range(NEW)])


def poll_ms(folder: Path, send: Callable[[Path, int], None], poll: Callable[[Path], int], turns: int) -> float:
    """Median milliseconds of a poll that gets ten new messages."""
    took = []
    for _ in range(turns):
        send(folder, NEW)
        began = time.perf_counter()
        found = poll(folder)
        took.append(time.perf_counter() - began)
        if found != NEW:
            raise RuntimeError(f"{found} of {NEW} messages came")
    return statistics.median(took) * 1000


def measure(work: Path, count: int, turns: int, many: int) -> dict[str, Any]:
    """All of it, in turns."""
    sends = {"ours": ours_sends, SQLITE: sqlite_sends, PERSIST: persist_sends}
    one: dict[str, list[float]] = {name: [] for name in sends}
    eight: dict[str, list[float]] = {name: [] for name in ("ours", SQLITE)}
    for turn in range(3):
        for name, send in sends.items():
            folder = work / f"one-{turn}"
            folder.mkdir(exist_ok=True)
            one[name].append(per_s(send, folder, count))
        for name in eight:
            folder = work / f"eight-{turn}"
            folder.mkdir(exist_ok=True)
            eight[name].append(per_s_of_many(sends[name], folder, count // 4))
        say(f"turn {turn + 1}: " + ", ".join(f"{name} {found[-1]:.0f} sends/s" for name, found in one.items()))
    few_folder, many_folder = work / "few", work / "many"
    for folder, old in ((few_folder, 1000), (many_folder, many)):
        folder.mkdir()
        say(f"{old} old messages")
        fill_ours(folder / "ours", old)
        fill_sqlite(folder, old)
    polls = {
        "poll_ms_after_1e3": poll_ms(few_folder, ours_sends, ours_poll, turns),
        "poll_ms_after_1e6": poll_ms(many_folder, ours_sends, ours_poll, turns),
    }
    sqlite_ms = poll_ms(many_folder, sqlite_sends, sqlite_poll, turns)
    persist_ms = poll_ms(few_folder, persist_sends, persist_poll, turns)
    return {
        "send_per_s_1": round(statistics.median(one["ours"])),
        "send_per_s_8": round(statistics.median(eight["ours"])),
        **{name: round(value, 3) for name, value in polls.items()},
        "old_messages": many,
        "peers": {
            SQLITE: {
                "send_per_s_1": round(statistics.median(one[SQLITE])),
                "send_per_s_8": round(statistics.median(eight[SQLITE])),
                "poll_ms": round(sqlite_ms, 3),
            },
            PERSIST: {
                "send_per_s_1": round(statistics.median(one[PERSIST])),
                "poll_ms": round(persist_ms, 3),
            },
        },
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    parser = argparse.ArgumentParser(prog="trunkline bench queue", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sends", type=int, default=1000, help="sends of one process in a turn (default 1000)")
    parser.add_argument("--turns", type=int, default=41, help="polls that the medians are of (default 41)")
    parser.add_argument("--old", type=int, default=1_000_000, help="old messages (default 1,000,000)")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trunkline-queue-") as work:
        result = measure(Path(work), args.sends, args.turns, args.old)
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
