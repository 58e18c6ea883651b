"""How fast the file queue sends and polls, next to SQLite and persist-queue with the same promise.

The promise of all: what a send or a poll has answered for is on the disk (fsync). Sends by one and by eight
processes; a poll of ten new messages after a thousand and after a million old ones. Peers: a table in SQLite
(WAL, synchronous=FULL) with a cursor per consumer, as ours has; and persist-queue's SQLite queue, which has one
reader and gives messages one by one. In turns, so that a busy moment hits all; medians.

Sends are counted twice. In use: everybody has opened what it needs and has sent some thousands before, so that
SQLite's log has its full length and is overwritten in place, with its checkpoints in the measured time. `_new`:
a queue that does not exist yet, made, opened and closed in the measured time. SQLite's log grows then, and
each of its sends costs twice as much. SQLite's poll is measured with a connection that it opens, as a program
does that is started for one poll, and (`connected`) with one that is open already.

    ./trunkline bench queue --json
"""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import persistqueue

from tests.benchmarks.bench_report import Bench, teller
from trunkline_agent.queue import Queue
from trunkline_agent.queue.cursors import write_cursor
from trunkline_agent.queue.message_record import new_id, stamp, to_line
from trunkline_agent.queue.session_files import MESSAGES, SessionFolder

BODY = "step 7 of 12 done, reading the index"
SESSION = "bench"
NEW = 10
PROCESSES = 8
TURNS = 3
# SQLite's log has a thousand pages by default, and a send takes one or two: after these it is overwritten.
SENT_BEFORE = 2000
SLICE = 25
GATE_S = 300
SQLITE, PERSIST = "sqlite-wal-full", "persist-queue"
Sender = Callable[[Path], AbstractContextManager[Callable[[], object]]]
_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
  id INTEGER PRIMARY KEY, msg_id TEXT, ts TEXT, sender TEXT, recipient TEXT, topic TEXT, body TEXT);
CREATE TABLE IF NOT EXISTS cursors (agent TEXT PRIMARY KEY, last INTEGER);
"""


say = teller("queue")


def opened(folder: Path) -> sqlite3.Connection:
    """The peer's database, with the promise that ours has.

    Only who makes it switches it to the log and makes the tables: the switch wants the file for itself, and of
    several processes that do it at once one gets `database is locked`, whatever its timeout.
    """
    is_new = not (folder / "peer.db").exists()
    found = sqlite3.connect(folder / "peer.db", isolation_level=None, timeout=60)
    if is_new:
        found.execute("PRAGMA journal_mode=WAL")
        found.executescript(_SCHEMA)
    found.execute("PRAGMA synchronous=FULL")
    return found


@contextmanager
def ours(folder: Path) -> Iterator[Callable[[], object]]:
    """Send with the library."""
    queue = Queue(folder / "ours", fsync=True)
    yield lambda: queue.send("status", BODY, to="bo", session=SESSION, sender="ann")


@contextmanager
def sqlite(folder: Path) -> Iterator[Callable[[], object]]:
    """The same into a table, a transaction each."""
    with closing(opened(folder)) as database:
        yield lambda: database.execute(
            "INSERT INTO messages (msg_id, ts, sender, recipient, topic, body) VALUES (?,?,?,?,?,?)",
            (new_id(), stamp(), "ann", "bo", "status", BODY),
        )


@contextmanager
def persist(folder: Path) -> Iterator[Callable[[], object]]:
    """The same with persist-queue."""
    queue = persistqueue.SQLiteQueue(str(folder / "persist"), auto_commit=True)
    try:
        yield lambda: queue.put({"msg_id": new_id(), "ts": stamp(), "from": "ann", "to": "bo", "body": BODY})
    finally:
        queue.close()


def send_all(sender: Sender, folder: Path, count: int) -> None:
    """Open it, send, close it."""
    with sender(folder) as send:
        for _ in range(count):
            send()


def new_per_s(sender: Sender, folder: Path, count: int) -> float:
    """Messages a second of one process, into a queue that is made for them."""
    began = time.perf_counter()
    send_all(sender, folder, count)
    return count / (time.perf_counter() - began)


def per_s(folder: Path, count: int) -> dict[str, list[float]]:
    """Messages a second of one process into queues in use, by sender, one for each turn.

    A few of one, a few of the next: what else the machine does hits all alike.
    """
    found: dict[str, list[float]] = {name: [] for name in SENDERS}
    with ExitStack() as stack:
        senders = {name: stack.enter_context(sender(folder)) for name, sender in SENDERS.items()}
        for send in senders.values():
            for _ in range(SENT_BEFORE):
                send()
        for _ in range(TURNS):
            took = dict.fromkeys(senders, 0.0)
            for _ in range(0, count, SLICE):
                for name, send in senders.items():
                    began = time.perf_counter()
                    for _ in range(SLICE):
                        send()
                    took[name] += time.perf_counter() - began
            slices = -(-count // SLICE)
            for name, seconds in took.items():
                found[name].append(slices * SLICE / seconds)
            say("one, in use: " + ", ".join(f"{name} {rates[-1]:.0f}/s" for name, rates in found.items()))
    return found


def _one_of_many(sender: Sender, folder: Path, count: int, gate: Barrier) -> None:
    with sender(folder) as send:
        for _ in range(SENT_BEFORE // PROCESSES):
            send()
        gate.wait(GATE_S)
        for _ in range(count):
            send()
        gate.wait(GATE_S)


def per_s_of_many(sender: Sender, folder: Path, count: int) -> float:
    """Messages a second of eight processes together into a queue in use, begun before the clock is."""
    send_all(sender, folder, 1)
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(PROCESSES + 1)
    processes = [
        context.Process(target=_one_of_many, args=(sender, folder, count, gate), daemon=True)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    gate.wait(GATE_S)
    began = time.perf_counter()
    gate.wait(GATE_S)
    took = time.perf_counter() - began
    for process in processes:
        process.join()
    return PROCESSES * count / took


SENDERS: dict[str, Sender] = {"ours": ours, SQLITE: sqlite, PERSIST: persist}


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
    """One poll of the peer, by a program that was started for it."""
    with closing(opened(folder)) as database:
        return sqlite_take(database)


def sqlite_take(database: sqlite3.Connection) -> int:
    """Read all messages after the cursor and move the cursor, in one transaction."""
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


def poll_ms(folder: Path, sender: Sender, poll: Callable[[Path], int], turns: int) -> float:
    """Median milliseconds of a poll that gets ten new messages."""
    took = []
    for _ in range(turns):
        send_all(sender, folder, NEW)
        began = time.perf_counter()
        found = poll(folder)
        took.append(time.perf_counter() - began)
        if found != NEW:
            raise RuntimeError(f"{found} of {NEW} messages came")
    return statistics.median(took) * 1000


def measure_sends(work: Path, count: int) -> dict[str, dict[str, int]]:
    """Measure the rates of each sender, in turns."""
    found: dict[str, dict[str, list[float]]] = {
        "send_per_s_1": {},
        "send_per_s_1_new": {name: [] for name in SENDERS},
        "send_per_s_8": {name: [] for name in ("ours", SQLITE)},
    }
    for turn in range(TURNS):
        for what, rates in found.items():
            for name, values in rates.items():
                folder = work / f"{what}-{turn}-{name}"
                folder.mkdir()
                if what == "send_per_s_8":
                    values.append(per_s_of_many(SENDERS[name], folder, count // 4))
                else:
                    values.append(new_per_s(SENDERS[name], folder, count))
                say(f"{what}: {name} {values[-1]:.0f}/s")
    folder = work / "in-use"
    folder.mkdir()
    found["send_per_s_1"] = per_s(folder, count)
    return {
        name: {what: round(statistics.median(rates[name])) for what, rates in found.items() if name in rates}
        for name in SENDERS
    }


def measure(work: Path, count: int, turns: int, many: int) -> dict[str, Any]:
    """All of it, in turns."""
    sends = measure_sends(work, count)
    few_folder, many_folder = work / "few", work / "many"
    for folder, old in ((few_folder, 1000), (many_folder, many)):
        folder.mkdir()
        say(f"{old} old messages")
        fill_ours(folder / "ours", old)
        fill_sqlite(folder, old)
    polls = {
        "poll_ms_after_1e3": poll_ms(few_folder, ours, ours_poll, turns),
        "poll_ms_after_1e6": poll_ms(many_folder, ours, ours_poll, turns),
    }
    sqlite_ms = poll_ms(many_folder, sqlite, sqlite_poll, turns)
    with closing(opened(many_folder)) as database:
        connected_ms = poll_ms(many_folder, sqlite, lambda _: sqlite_take(database), turns)
    persist_ms = poll_ms(few_folder, persist, persist_poll, turns)
    return {
        **sends["ours"],
        **{name: round(value, 3) for name, value in polls.items()},
        "old_messages": many,
        "peers": {
            SQLITE: {
                **sends[SQLITE],
                "poll_ms": round(sqlite_ms, 3),
                "poll_ms_connected": round(connected_ms, 3),
            },
            PERSIST: {**sends[PERSIST], "poll_ms": round(persist_ms, 3)},
        },
    }


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("queue", __doc__)
    bench.add_argument("--sends", type=int, default=1000, help="sends of one process in a turn (default 1000)")
    bench.add_argument("--turns", type=int, default=41, help="polls that the medians are of (default 41)")
    bench.add_argument("--old", type=int, default=1_000_000, help="old messages (default 1,000,000)")
    return bench.run(lambda args, work: measure(work, args.sends, args.turns, args.old))


if __name__ == "__main__":
    sys.exit(main())
