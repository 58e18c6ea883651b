"""The queue's files, and damage to them: cut, missing or in the way (FQ-03 to FQ-06, FQ-10, FQ-11)."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.agent_sdk.agent_queue.expired_messages import GONE_S, send_gone
from tests.connectors.agent_sdk.agent_queue.test_queue_hostile_lines import GOOD, to_line, write
from trunkline_agent.queue import Queue, QueueError


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["body"] for message in messages]


def audit_of(queue: Queue) -> list[dict[str, Any]]:
    return [json.loads(line) for line in queue.audit_path.read_text().splitlines()]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is given to fsync, in order."""
    names: list[str] = []
    fsync = os.fsync

    def seen(fd: int) -> None:
        names.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    return names


@pytest.mark.requirement("FQ-11")
def test_the_files_lie_where_the_spec_says_for_their_owner_alone(queue: Queue, session_path: Path) -> None:
    os.umask(old := os.umask(0))
    os.umask(0)
    try:
        msg_id = queue.send("ask", "x" * 3585)
        queue.poll("ann")
    finally:
        os.umask(old)
    found = {str(p.relative_to(queue.root)): stat.S_IMODE(p.stat().st_mode) for p in queue.root.rglob("*")}
    assert found == {
        "audit.jsonl": 0o600,
        "sessions": 0o700,
        "sessions/default": 0o700,
        "sessions/default/messages.jsonl": 0o600,
        "sessions/default/bodies": 0o700,
        f"sessions/default/bodies/{msg_id}.txt": 0o600,
        "sessions/default/cursors": 0o700,
        "sessions/default/cursors/ann.cursor": 0o600,
        "sessions/default/.lock": 0o600,
    }
    assert stat.S_IMODE(queue.root.stat().st_mode) == 0o700


@pytest.mark.requirement("FQ-03")
def test_a_body_over_the_threshold_goes_to_a_side_file(queue: Queue, session_path: Path) -> None:
    assert queue.body_threshold == 3584
    small, large = "é" * 1792, "é" * 1792 + "x"
    queue.send("ask", small)
    msg_id = queue.send("ask", large)
    lines = (session_path / "messages.jsonl").read_text().splitlines()
    assert [json.loads(line)["body"] for line in lines] == [small, f"@file:{msg_id}.txt"]
    assert (session_path / "bodies" / f"{msg_id}.txt").read_text() == large
    first, second = queue.poll("ann")
    assert (first["body"], second["body"], second["_body_source"]) == (small, large, "side-file")
    assert "_body_source" not in first
    assert queue.tail(1) == [second]


@pytest.mark.requirement("FQ-03")
@pytest.mark.parametrize("fsync", [True, False])
def test_the_side_file_is_on_the_disk_before_the_line(tmp_path: Path, synced: list[str], fsync: bool) -> None:
    queue = Queue(tmp_path / "q", fsync=fsync, step=synced.append, body_threshold=0)
    queue.send("ask", "x")
    synced.clear()
    msg_id = queue.send("ask", "x")
    before = [f"{msg_id}.txt", "bodies", "side_file_written", "before_append", "appended"]
    assert synced == [*before, *(["messages.jsonl", "synced"] if fsync else []), "audited"]


@pytest.mark.requirement("FQ-11")
@pytest.mark.parametrize(("setting", "times"), [(None, 1), ("1", 1), ("0", 0)])
def test_what_send_promises_is_a_setting(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, setting: str | None, times: int
) -> None:
    if setting is not None:
        monkeypatch.setenv("TRUNKLINE_QUEUE_FSYNC", setting)
    queue = Queue(tmp_path / "q")
    queue.send("ask", "first")
    # The names of new folders are put on the disk in any case: others rely on them.
    assert {"default", "sessions", "q", tmp_path.name} <= set(synced)
    synced.clear()
    queue.send("ask", "second")
    assert synced == ["messages.jsonl"] * times


@pytest.mark.requirement("FQ-06")
def test_a_line_is_one_write_under_the_lock(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.send("ask", "first")
    written: list[tuple[str, int]] = []
    write_really = os.write

    def seen(fd: int, data: bytes) -> int:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        written.append((name, len(data)))
        if name == "messages.jsonl":
            locks = Path("/proc/locks").read_text()
            inode = (queue.root / "sessions" / "default" / ".lock").stat().st_ino
            assert any("FLOCK" in line and f":{inode} " in line for line in locks.splitlines())
        return write_really(fd, data)

    monkeypatch.setattr(os, "write", seen)
    queue.send("ask", "x" * 3000)
    assert [name for name, _ in written] == ["messages.jsonl", "audit.jsonl"]
    assert written[0][1] > 3000


@pytest.mark.long
@pytest.mark.requirement("FQ-05")
def test_a_file_cut_at_any_byte_gives_whole_messages_and_goes_on(tmp_path: Path) -> None:
    origin = Queue(tmp_path / "origin", fsync=False, body_threshold=9)
    sent = [origin.send("ask", body) for body in ("1", "2", "“last”")]
    path = origin.root / "sessions" / "default" / "messages.jsonl"
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(len(data) + 1):
        queue = Queue(tmp_path / "cut", fsync=False)
        shutil.copytree(origin.root, queue.root)
        with (queue.root / "sessions" / "default" / "messages.jsonl").open("r+b") as file:
            file.truncate(cut)
        whole = [msg_id for msg_id, end in zip(sent, ends, strict=True) if end <= cut]
        assert [m["msg_id"] for m in queue.poll("early")] == whole == [m["msg_id"] for m in queue.tail()]
        # The next sender ends the cut line: a message, if only its newline is missing, and else none.
        if cut + 1 in ends:
            whole.append(sent[len(whole)])
        new = queue.send("ask", "new")
        late = [m["msg_id"] for m in queue.poll("early")]
        assert [m["msg_id"] for m in queue.poll("late")] == [*whole, new]
        assert late == ([*whole, new][-2:] if cut + 1 in ends else [new])
        shutil.rmtree(queue.root)


@pytest.mark.requirement("FQ-03")
def test_a_side_file_cut_at_any_byte_never_fails_and_gives_no_broken_character(
    queue: Queue, session_path: Path
) -> None:
    body = "“é”\U0001f600" * 300
    msg_id = queue.send("ask", body)
    path = session_path / "bodies" / f"{msg_id}.txt"
    for cut in range(len(body.encode()) - 1, -1, -29):
        os.truncate(path, cut)
        (found,) = queue.tail(1)
        if "_body_error" not in found:
            assert cut > 0 and body.startswith(found["body"]) and len(found["body"].encode()) == cut


@pytest.mark.requirement("FQ-04")
def test_a_cursor_cut_at_any_byte_is_an_error_that_names_it_and_delivers_nothing_twice(
    queue: Queue, session_path: Path
) -> None:
    queue.send("ask", "first")
    queue.poll("ann")
    queue.send("ask", "second")
    path = session_path / "cursors" / "ann.cursor"
    whole = path.read_bytes()
    for broken in [*(whole[:cut] for cut in range(len(whole))), b"-1\n", b"x", b"\xff", b"9" * 5000, b"1 2\n"]:
        path.write_bytes(broken)
        with pytest.raises(QueueError, match=r"ann\.cursor is not whole"):
            queue.poll("ann")
        assert queue.status()["sessions"]["default"]["cursors"] == {"ann": None}
        send_gone(queue, "ask", "gone")
        assert queue.expire() == 1
        assert path.read_bytes() == broken
    path.write_text(str(int(whole)))  # by hand, or by the older queue
    assert bodies(queue.poll("ann")) == ["second"]


@pytest.mark.requirement("FQ-04")
def test_a_shortened_file_delivers_nothing_twice_and_a_deleted_one_begins_anew(
    queue: Queue, session_path: Path
) -> None:
    for number in range(6):
        queue.send("ask", str(number))
    queue.poll("ann")
    path = session_path / "messages.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:7])
    assert queue.poll("ann") == []
    queue.send("ask", "after the cut")
    assert bodies(queue.poll("ann")) == ["after the cut"]
    path.unlink()
    queue.send("ask", "after the deletion")
    assert bodies(queue.poll("ann")) == ["after the deletion"]
    path.unlink()
    assert queue.poll("ann") == []
    queue.send("ask", "once more")
    assert bodies(queue.poll("ann")) == ["once more"]


@pytest.mark.long
@pytest.mark.requirement("FQ-04")
def test_a_cursor_in_the_middle_of_a_line_never_delivers_its_rest(queue: Queue, session_path: Path) -> None:
    inner = to_line({**GOOD, "body": "forged"}).decode().strip()
    queue.send("ask", inner)
    queue.send("ask", "next")
    size = (session_path / "messages.jsonl").read_bytes().index(b"\n") + 1
    for offset in range(1, size):
        (session_path / "cursors" / "ann.cursor").write_bytes(b"%019d\n" % offset)
        assert bodies(queue.poll("ann")) == ["next"]


@pytest.mark.requirement("FQ-10")
def test_each_operation_leaves_one_audit_line_without_a_body(queue: Queue) -> None:
    first = send_gone(queue, "ask", "secret", to="bo", sender="ann")
    second = queue.send("ask", "secret" * 1000)
    queue.poll("bo", ["ask"])
    queue.expire()
    queue.tail()
    queue.status()
    lines = audit_of(queue)
    assert [line.pop("ts")[-1] for line in lines] == ["Z"] * 4
    assert {line.pop("session") for line in lines} == {"default"}
    cursor = lines[2]["cursor_to"]
    assert cursor > 0
    assert lines == [
        {
            "op": "send",
            "msg_id": first,
            "topic": "ask",
            "to": "bo",
            "from": "ann",
            "body_bytes": 6,
            "externalized": False,
            "ttl_s": GONE_S,
        },
        {
            "op": "send",
            "msg_id": second,
            "topic": "ask",
            "to": None,
            "from": "anonymous",
            "body_bytes": 6000,
            "externalized": True,
            "ttl_s": None,
        },
        {
            "op": "poll",
            "agent_id": "bo",
            "topics": ["ask"],
            "matched": 1,
            "cursor_from": 0,
            "cursor_to": cursor,
            "msg_ids": [second],
        },
        {"op": "expire", "removed": 1},
    ]
    assert "secret" not in queue.audit_path.read_text()


@pytest.mark.requirement("FQ-10")
@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_an_audit_that_cannot_be_written_does_not_make_a_send_look_failed(
    queue: Queue, kind: str, tmp_path: Path
) -> None:
    queue.root.mkdir()
    if kind == "folder":
        queue.audit_path.mkdir()
    elif kind == "link":
        queue.audit_path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(queue.audit_path)
    queue.send("ask", "x")
    assert "audit.jsonl was not written" in (queue.audit_error or "")
    assert bodies(queue.poll("ann")) == ["x"]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.requirement("FQ-10")
def test_a_torn_audit_line_does_not_take_the_next_one_with_it(queue: Queue) -> None:
    queue.send("ask", "x")
    with queue.audit_path.open("ab") as file:
        file.write(b'{"op":"se')
    queue.send("ask", "y")
    lines = queue.audit_path.read_text().splitlines()
    assert (lines[1], len(lines), json.loads(lines[2])["op"]) == ('{"op":"se', 3, "send")


@pytest.mark.requirement("FQ-12")
@pytest.mark.parametrize("name", ["messages.jsonl", ".lock", "cursors/ann.cursor"])
@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_lies_in_the_way_of_a_file_is_a_clear_error_and_is_not_followed(
    queue: Queue, session_path: Path, tmp_path: Path, name: str, kind: str
) -> None:
    queue.send("ask", "x")
    (session_path / name).unlink(missing_ok=True)
    target = tmp_path / "target"
    target.write_text("untouched\n")
    if kind == "link":
        (session_path / name).symlink_to(target)
    else:
        (session_path / name).mkdir()
    with pytest.raises(QueueError, match="the poll failed"):
        queue.poll("ann")
    if not name.startswith("cursors"):
        with pytest.raises(QueueError, match="the message failed"):
            queue.send("ask", "y")
    assert target.read_text() == "untouched\n"


@pytest.mark.requirement("FQ-12")
def test_a_root_that_is_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QueueError, match="Not a directory"):
        Queue(tmp_path / "file").send("ask", "x")


@pytest.mark.long
@pytest.mark.requirement("FQ-04")
def test_a_poll_reads_what_is_new_and_a_tail_what_is_last_however_long_the_file(
    queue: Queue, session_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    pread = os.pread

    def seen(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        piece = pread(fd, size, offset)
        read += len(piece)
        return piece

    monkeypatch.setattr(os, "pread", seen)
    costs = []
    for count in (1_000, 100_000):
        write(session_path, to_line(GOOD) * count)
        queue.poll("ann")
        for number in range(10):
            queue.send("ask", str(number))
        read = 0
        assert len(queue.poll("ann")) == 10
        polled, read = read, 0
        assert len(queue.tail(10)) == 10
        costs.append((polled, read))
    (few, few_tail), (many, many_tail) = costs
    assert abs(many - few) < 50
    assert few_tail <= many_tail <= 256 * 1024


@pytest.mark.requirement("FQ-10")
def test_a_poll_of_very_many_messages_is_audited_in_pieces(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline_agent.queue.message_queue.AUDITED_IDS", 3)
    sent = [queue.send("ask", str(n), to="bo", sender="ann") for n in range(7)]
    queue.poll("bo")
    queue.poll("bo")
    polls = [line for line in audit_of(queue) if line["op"] == "poll"]
    assert [line["msg_ids"] for line in polls] == [sent[:3], sent[3:6], sent[6:], []]
    assert [line["matched"] for line in polls] == [3, 3, 1, 0]
    assert len({(line["cursor_from"], line["cursor_to"]) for line in polls[:3]}) == 1
