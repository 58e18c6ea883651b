"""Side-files that no line names: expire takes them when they are old, and never from under a sender (FQ-08)."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from tests.connectors.agent_sdk.agent_queue.queue_process import killed, queue_process, stopped
from tests.connectors.agent_sdk.agent_queue.test_queue_hostile_lines import GOOD, to_line, write
from trunkline_agent.queue import Queue, expiry
from trunkline_agent.queue.expiry import ORPHAN_AGE_S

pytestmark = pytest.mark.requirement("FQ-08")

LONG = "x" * 5000


@pytest.fixture
def bodies(session_path: Path) -> Path:
    """The folder of side-files of a session in which one message with a side-file lies."""
    Queue(session_path.parents[1], fsync=False).send("ask", LONG, to="early")
    return session_path / "bodies"


def names(bodies: Path) -> set[str]:
    return {path.name for path in bodies.iterdir()}


def age(bodies: Path, seconds: float = ORPHAN_AGE_S + 60) -> None:
    """Let all that lies there be so old."""
    then = time.time() - seconds
    for path in bodies.iterdir():
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.mark.parametrize("step", ["half_a_side_file", "side_file_written", "before_append", "half_a_line"])
def test_what_a_killed_sender_leaves_goes_when_it_is_old_and_not_before(
    queue: Queue, bodies: Path, step: str
) -> None:
    named = names(bodies)
    assert killed(queue.root, "send", step) == ""
    (orphan,) = names(bodies) - named
    age(bodies, ORPHAN_AGE_S - 60)
    assert queue.expire() == 0 and names(bodies) == {*named, orphan}
    age(bodies)
    assert queue.expire() == 0 and names(bodies) == named
    assert [message["body"] for message in queue.poll("early")] == [LONG]
    expires = [json.loads(line) for line in queue.audit_path.read_text().splitlines()][-3:-1]
    assert [(line["op"], line.get("orphans")) for line in expires] == [("expire", None), ("expire", 1)]


def test_it_goes_also_when_messages_expire_with_it(queue: Queue, bodies: Path) -> None:
    named = names(bodies)
    killed(queue.root, "send", "side_file_written")
    age(bodies)
    send_gone(queue, "ask", LONG)
    fresh = queue.send("ask", LONG)
    assert queue.expire() == 1
    assert names(bodies) == {*named, f"{fresh}.txt"}


def test_what_a_line_names_stays_however_old_and_so_does_what_is_no_side_file(
    queue: Queue, session_path: Path, bodies: Path
) -> None:
    message = {**GOOD, "ttl_s": 9e9}
    write(session_path, to_line({**message, "msg_id": "m2", "body": "@file:m2.txt"}))
    # One that is no message yet: somebody may mend it. And one that ends when the next sender comes.
    write(session_path, to_line({**message, "msg_id": "m3", "body": "@file:m3.txt"})[:-2] + b"\n")
    write(session_path, to_line({**message, "msg_id": "m4", "body": "@file:m4.txt"})[:-1])
    for name in ("m2.txt", "m3.txt", "m4.txt", "notes.md", ".m5.txt"):
        (bodies / name).write_text("body of " + name)
    (bodies / "folder.txt").mkdir()
    (bodies / "link.txt").symlink_to(session_path / "messages.jsonl")
    before = names(bodies)
    (bodies / "m6.txt").write_text("nobody names it")
    age(bodies)
    assert queue.expire() == 0 and names(bodies) == before
    queue.send("ask", "after")
    found = [message["body"] for message in queue.poll("ann")]
    assert found == ["body of m2.txt", "body of m4.txt", "after"]


def test_without_a_file_of_messages_or_of_side_files_nothing_goes_and_nothing_is_made(
    queue: Queue, session_path: Path, bodies: Path
) -> None:
    (session_path / "messages.jsonl").unlink()
    age(bodies)
    assert queue.expire() == 0 and len(names(bodies)) == 1
    # The session begins anew: now the file is nobody's.
    queue.send("ask", "new")
    assert queue.expire() == 0 and names(bodies) == set()
    bodies.rmdir()
    assert queue.expire() == 0 and not bodies.exists()


@pytest.mark.parametrize("step", ["side_file_written", "before_append"])
def test_a_sender_that_stood_still_for_days_before_its_line_finds_its_side_file(
    queue: Queue, bodies: Path, step: str
) -> None:
    killed(queue.root, "send", "side_file_written")
    with stopped(queue.root, "send", step) as sender:
        age(bodies)
        if step == "side_file_written":  # it has not the session's lock yet
            assert queue.expire() == 0 and len(names(bodies)) == 3
        sender.send_signal(signal.SIGCONT)
        assert sender.stdout is not None
        sent = sender.stdout.read().strip()
        assert sender.wait(60) == 0
    assert queue.expire() == 0 and len(names(bodies)) == 2
    (message,) = queue.poll("ann")
    assert (message["msg_id"], message["body"]) == (sent, "killed" * 1000)


def test_a_sender_that_is_killed_while_it_stands_still_leaves_a_file_that_goes(
    queue: Queue, bodies: Path
) -> None:
    with stopped(queue.root, "send", "side_file_written"):
        age(bodies)
    assert queue.expire() == 0 and len(names(bodies)) == 1


def test_an_expire_killed_among_the_orphans_leaves_the_others_to_the_next(queue: Queue, bodies: Path) -> None:
    for _ in range(3):
        killed(queue.root, "send", "side_file_written")
    send_gone(queue, "ask", "gone")
    age(bodies)
    assert killed(queue.root, "expire", "orphan_removed", 2) == ""
    assert len(names(bodies)) == 2
    assert queue.expire() == 0 and len(names(bodies)) == 1
    assert [message["body"] for message in queue.poll("early")] == [LONG]


@pytest.mark.long
def test_no_side_file_is_taken_from_under_many_senders_even_without_the_age(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "ORPHAN_AGE_S", -60.0)
    senders = [queue_process(queue.root, "send many", "", 1, f"s{number}", 150) for number in range(3)]
    expires = 0
    while any(sender.poll() is None for sender in senders):
        queue.expire()
        expires += 1
    sent = [sender.communicate(timeout=60)[0].split() for sender in senders]
    assert [sender.returncode for sender in senders] == [0] * 3 and expires > 10
    lasting = {msg_id for ids in sent for number, msg_id in enumerate(ids) if number % 5 != 4}
    found = queue.poll("ann")
    assert {message["msg_id"] for message in found} == lasting
    assert not any("_body_error" in message for message in found)
    assert sum(message.get("_body_source") == "side-file" for message in found) > 50
    # And with nobody at work it takes what is nobody's.
    killed(queue.root, "send", "side_file_written")
    queue.expire()
    kept = {f"{message['msg_id']}.txt" for message in found if "_body_source" in message}
    assert names(queue.root / "sessions" / "default" / "bodies") == kept
