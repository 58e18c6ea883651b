"""Many senders at once, `kill -9` anywhere, a disk that is full (FQ-04, FQ-05, FQ-06, FQ-13)."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from tests.connectors.agent_sdk.agent_queue.queue_process import PROJECT_ROOT, killed, queue_process
from tests.programs import run_program
from trunkline_agent.queue import Queue, QueueError

SENDERS = 8


def everybody_sends(root: Path, count: int) -> None:
    """Eight processes send, one consumer polls and expires meanwhile: nothing torn, lost or doubled."""
    queue = Queue(root)
    done = threading.Event()
    taken: list[dict[str, str]] = []

    def consume() -> None:
        expired_at = 0
        while not done.wait(0.02):
            taken.extend(queue.poll("ann"))
            if len(taken) - expired_at >= count:  # it reads the whole file
                expired_at = len(taken)
                queue.expire()
        taken.extend(queue.poll("ann"))

    senders = [queue_process(root, "send many", "", 1, f"s{number}", count) for number in range(SENDERS)]
    consumer = threading.Thread(target=consume)
    consumer.start()
    said = [sender.communicate(timeout=280)[0].split() for sender in senders]
    done.set()
    consumer.join()
    assert [sender.returncode for sender in senders] == [0] * SENDERS
    lasting = [[msg_id for i, msg_id in enumerate(ids) if i % 5 != 4] for ids in said]
    assert [len(ids) for ids in said] == [count] * SENDERS
    assert len({message["msg_id"] for message in taken}) == len(taken)
    # Each sender's messages come in its order, whole and once. One that expires at once may come before it has.
    brief = {msg_id for ids in said for msg_id in ids[4::5]}
    taken = [message for message in taken if message["msg_id"] not in brief]
    for number, ids in enumerate(lasting):
        mine = [message for message in taken if message["from"] == f"s{number}"]
        assert [message["msg_id"] for message in mine] == ids
        for message in mine:
            me, which, padding = message["body"].split(" ")
            assert (me, padding) == (f"s{number}", "x" * (int(which) * 37 % 5000))
    assert not any("_body_error" in message for message in taken)
    queue.expire()
    # A second consumer finds all of them in one order, the same as the first one saw.
    assert [m["msg_id"] for m in queue.poll("bo")] == [m["msg_id"] for m in taken]
    assert queue.status()["unparseable"] == 0
    audit = [json.loads(line) for line in queue.audit_path.read_text().splitlines()]
    assert Counter(line["op"] for line in audit)["send"] == SENDERS * count
    assert sum(line["removed"] for line in audit if line["op"] == "expire") == SENDERS * (count // 5)


@pytest.mark.long
@pytest.mark.requirement("FQ-06")
def test_eight_processes_send_at_once_and_nothing_is_torn_lost_or_doubled(tmp_path: Path) -> None:
    everybody_sends(tmp_path / "q", 200)


@pytest.mark.slow
@pytest.mark.requirement("FQ-06")
def test_eight_processes_send_five_thousand_each_and_nothing_is_torn_lost_or_doubled(tmp_path: Path) -> None:
    everybody_sends(tmp_path / "q", 5_000)


@pytest.mark.requirement("FQ-13")
@pytest.mark.parametrize(
    ("step", "arrives"),
    [
        *(("side_file_written", False), ("before_append", False), ("half_a_line", False)),
        *(("appended", True), ("synced", True), ("audited", True)),
    ],
)
def test_a_sender_killed_anywhere_leaves_a_whole_message_or_none(
    queue: Queue, step: str, arrives: bool
) -> None:
    queue.send("ask", "before")
    assert [m["body"] for m in queue.poll("early")] == ["before"]
    assert killed(queue.root, "send", step) == ""
    between = ["killed" * 1000] if arrives else []
    assert [m["body"] for m in queue.poll("early")] == between
    queue.send("ask", "after")
    assert [m["body"] for m in queue.poll("early")] == ["after"]
    assert [m["body"] for m in queue.poll("late")] == ["before", *between, "after"]


@pytest.mark.requirement("FQ-13")
@pytest.mark.parametrize(
    ("step", "taken"),
    [
        *(("scanned", False), ("half_a_cursor", False), ("before_replacing_.cursor", False)),
        *(("cursor_written", True), ("audited", True)),
    ],
)
def test_a_poller_killed_anywhere_gets_nothing_twice(queue: Queue, step: str, taken: bool) -> None:
    first = [queue.send("ask", str(number)) for number in range(3)]
    assert killed(queue.root, "poll", step) == ""
    later = queue.send("ask", "later")
    assert [m["msg_id"] for m in queue.poll("ann")] == ([] if taken else first) + [later]
    assert [m["msg_id"] for m in queue.poll("bo")] == [*first, later]


FULL_DISK = """
import json, os, sys
from pathlib import Path
from trunkline_agent.queue import Queue, QueueError
root = Path(sys.argv[1])
ballast = root.parent / "ballast"
queue = Queue(root)
said, refused = [], []
for number in range(1000):
    try:
        said.append(queue.send("ask", f"{number} " + "x" * (number * 997 % 6000)))
    except QueueError as error:
        refused.append(str(error))
        if len(refused) == 20:
            break
cursor = root / "sessions" / "default" / "cursors" / "ann.cursor"
polls = []
if ballast.exists():
    # Fill up what is left to the last byte, so that a cursor has no room either.
    with (root.parent / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 512)
        except OSError:
            pass
    try:
        polls.append([m["msg_id"] for m in queue.poll("ann")])
    except QueueError as error:
        polls.append(str(error))
    ballast.unlink()
    said.append(queue.send("ask", "there is room again"))
print(json.dumps({"said": said, "refused": refused, "polls": polls,
                  "ann": [m["msg_id"] for m in queue.poll("ann")],
                  "lines": (root / "sessions/default/messages.jsonl").read_text(),
                  "bodies": sorted(os.listdir(root / "sessions/default/bodies"))}))
"""
MOUNT = 'mkdir -p "$1" && mount -t tmpfs -o size=600k tmpfs "$1" && head -c 100000 /dev/zero >"$1/ballast"'
SHELL = f'{MOUNT} && shift && exec "$@"'


def run_full_disk(command: list[str], root: Path, limit: int | None = None) -> dict[str, list[str]]:
    """Run FULL_DISK and return what it saw."""
    done = run_program(
        [*command, sys.executable, "-P", "-c", FULL_DISK, str(root)],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def nothing_is_half_written(seen: dict[str, list[str]]) -> None:
    """Each confirmed message is stored once, and no byte of a refused message is stored."""
    assert len(seen["refused"]) >= 10 and len(seen["said"]) > 10
    assert all("no room left for the message" in why and "expire" in why for why in seen["refused"])
    lines = [json.loads(line) for line in str(seen["lines"]).splitlines()]
    assert [line["msg_id"] for line in lines] == seen["said"] == seen["ann"]
    referred = sorted(f"{m['msg_id']}.txt" for m in lines if m["body"].startswith("@file:"))
    assert seen["bodies"] == referred


@pytest.mark.requirement("FQ-06")
def test_a_file_that_may_not_grow_refuses_clearly_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    # The limit is reached in the middle of a line: the system takes the first part and refuses the rest.
    nothing_is_half_written(run_full_disk([], tmp_path / "q", 100_001))
    queue = Queue(tmp_path / "q")
    assert queue.poll("ann") == []
    queue.send("ask", "there is room again")
    assert [m["body"] for m in queue.poll("ann")] == ["there is room again"]


@pytest.mark.requirement("FQ-06")
def test_a_full_disk_refuses_clearly_and_works_again_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    # A mount of its own in a namespace of its own: it ends with the process.
    command = ["unshare", "--mount", "bash", "-c", SHELL, "bash", str(disk)]
    may_mount = (
        shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode
    )
    if may_mount:
        seen = run_full_disk(command, disk / "q")
        assert "no room left for the poll" in seen["polls"][0]
    else:  # the same by the only other means there is without root
        seen = run_full_disk([], tmp_path / "q", 50_001)
    nothing_is_half_written(seen)


@pytest.mark.requirement("FQ-08")
def test_an_expire_without_room_for_the_new_file_changes_nothing(queue: Queue, session_path: Path) -> None:
    for number in range(6):
        send_gone(queue, "ask", "x" * 1000) if number % 2 else queue.send("ask", "x" * 1000)
    queue.poll("ann")
    before = {path: path.read_bytes() for path in session_path.rglob("*") if path.is_file()}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, old[1]))
    try:
        with pytest.raises(QueueError, match="no room left for the expire"):
            queue.expire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert {path: path.read_bytes() for path in session_path.rglob("*") if path.is_file()} == before
    assert queue.expire() == 3


@pytest.mark.requirement("FQ-13")
def test_threads_that_poll_as_one_agent_share_the_messages_and_none_comes_twice(queue: Queue) -> None:
    sent = [queue.send("ask", str(number)) for number in range(50)]
    taken: list[str] = []

    def take() -> None:
        for _ in range(20):
            taken.extend(m["msg_id"] for m in queue.poll("ann"))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    sent += [queue.send("ask", str(number)) for number in range(50)]
    for thread in threads:
        thread.join()
    taken.extend(m["msg_id"] for m in queue.poll("ann"))
    assert sorted(taken) == sorted(sent)


@pytest.mark.requirement("FQ-06")
def test_a_lock_file_that_was_deleted_meanwhile_is_not_taken_for_the_lock(
    queue: Queue, session_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, deleted = fcntl.flock, []

    def delete_it_behind_the_first(fd: int, how: int) -> None:
        flock(fd, how)
        if how == fcntl.LOCK_EX and not deleted:
            deleted.append(os.fstat(fd).st_ino)
            (session_path / ".lock").rename(session_path / "moved")

    held: list[bool] = []

    def step(name: str) -> None:
        if name == "before_append":
            inode = (session_path / ".lock").stat().st_ino
            held.append(f":{inode} " in Path("/proc/locks").read_text())

    monkeypatch.setattr(fcntl, "flock", delete_it_behind_the_first)
    queue.send("ask", "x", session="default")
    assert len(deleted) == 1
    Queue(queue.root, step=step).send("ask", "y")
    deleted.clear()
    Queue(queue.root, step=step).send("ask", "z")
    assert held == [True, True]
