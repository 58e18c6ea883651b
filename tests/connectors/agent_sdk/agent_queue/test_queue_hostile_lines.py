"""Hostile lines in the files cause no crash and lead to no path outside the queue (FQ-03, FQ-05)."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from trunkline_agent.queue import Queue, message_record, session_files
from trunkline_agent.queue.command_line import main
from trunkline_agent.queue.message_record import LINE_LIMIT, parse_line, to_line

GOOD = {
    "msg_id": "m1",
    "ts": "2026-01-01T00:00:00.000001Z",
    "from": "ann",
    "to": None,
    "topic": "ask",
    "body": "hello",
    "in_reply_to": None,
    "ttl_s": None,
}
WRONG_FIELDS = {
    "msg_id": [None, 1, "", "../../etc/passwd", "a/b", "a\n", [], "x" * 129],
    "ts": [None, 1, "", "yesterday", "2026-13-01T00:00:00Z", "2026-01-01", "２０26-01-01T00:00:00Z"],
    "from": [None, 1, "", "a b", {}],
    "to": [1, "", "a/b", ["bo"], {}, False],
    "topic": [None, 1, "nothing", "ASK", [], {}],
    "body": [None, 1, {"text": "x"}, ["x"], "\ud800"],
    "in_reply_to": [1, "", "../x", []],
    "ttl_s": ["1", -1, True, [], 10**400],
}
WRONG_LINES = [
    *(b"", b" ", b"\r", b"{}", b"[]", b"null", b'"text"', b"1", b"\xff\xfe", b"\0\0\0", b"{", b"not json"),
    b"\xef\xbb\xbf\xef\xbb\xbf" + to_line(GOOD).strip(),
    to_line(GOOD).decode().strip().encode("utf-16-le"),
    to_line(GOOD).strip()[:-1],
    to_line(GOOD).strip() + b"x",
    to_line(GOOD).strip() * 2,
    to_line(GOOD).replace(b"hello", b"hel\xfflo").strip(),
    to_line(GOOD).replace(b"hello", b"hel\x01lo").strip(),
    to_line(GOOD).replace(b'"ttl_s":null', b'"ttl_s":NaN').strip(),
    to_line(GOOD).replace(b'"ttl_s":null', b'"ttl_s":1e999').strip(),
    to_line(GOOD).replace(b'"ttl_s":null', b'"ttl_s":' + b"9" * 5000).strip(),
    to_line(GOOD).replace(b'"to":null', b'"to":null,"to":"bo"').strip(),
    to_line(GOOD).replace(b'"to":null', b'"to":' + b"[" * 100_000).strip(),
    to_line(GOOD).replace(b'"to":null', b'"x":' + b"[" * 100_000 + b"]" * 100_000).strip(),
    *(to_line({**GOOD, key: value}).strip() for key, values in WRONG_FIELDS.items() for value in values),
    *(
        to_line({k: v for k, v in GOOD.items() if k != key}).strip()
        for key in ("msg_id", "ts", "from", "topic", "body")
    ),
]


def write(folder: Path, *lines: bytes) -> None:
    """Append lines as somebody would who knows nothing of the queue."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "messages.jsonl").open("ab") as file:
        file.writelines(lines)


@pytest.mark.requirement("FQ-05")
def test_every_line_that_is_no_message_is_skipped_by_poll_and_kept_by_expire(
    queue: Queue, session_path: Path
) -> None:
    for line in WRONG_LINES:
        write(session_path, line + b"\n")
        queue.send("ask", str(line[:9]), ttl_s=None)
    gone = send_gone(queue, "ask", "gone")
    assert [m["body"] for m in queue.poll("ann")] == [str(line[:9]) for line in WRONG_LINES]
    assert len(queue.tail(1000)) == len(WRONG_LINES)
    assert queue.status()["unparseable"] == len(WRONG_LINES)
    before = (session_path / "messages.jsonl").read_bytes()
    assert queue.expire() == 1
    kept = (session_path / "messages.jsonl").read_bytes()
    assert before.startswith(kept) and gone.encode() not in kept
    assert queue.poll("ann") == []


@pytest.mark.requirement("FQ-05")
@settings(deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_no_bytes_whatever_make_the_reader_of_a_line_fail(line: bytes) -> None:
    assert parse_line(line) is None


@pytest.mark.requirement("FQ-05")
@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "_body_source", "extra"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=5,
        ),
    )
)
def test_whatever_the_fields_hold_a_message_has_eight_good_ones(fields: dict[str, Any]) -> None:
    found = parse_line(json.dumps({**GOOD, **fields}).encode())
    if found is not None:
        assert list(found) == list(GOOD)
        assert all(found[key] == fields.get(key, GOOD[key]) for key in GOOD)
        assert json.loads(to_line(found)) == found
        assert message_record.is_expired(found, 0.0) in (True, False)


@pytest.mark.requirement("FQ-02")
@pytest.mark.parametrize("ts", ["2026-01-01T00:00:00", "2026-01-01T01:00:00+01:00", "2026-01-01T00:00:00.0Z"])
def test_a_foreign_line_may_say_its_time_in_other_ways_and_leave_out_what_is_null(
    queue: Queue, session_path: Path, ts: str
) -> None:
    short = {key: GOOD[key] for key in ("msg_id", "from", "topic", "body")} | {"ts": ts}
    write(session_path, json.dumps(short).encode() + b"\r\n", to_line({**GOOD, "ts": ts, "ttl_s": 5}))
    assert queue.poll("bo") == [{**GOOD, "ts": ts}]
    assert message_record._seconds(ts) == 1767225600.0


@pytest.mark.requirement("FQ-03")
def test_what_only_the_queue_may_say_is_dropped_from_a_foreign_line(queue: Queue, session_path: Path) -> None:
    forged = {**GOOD, "_body_source": "side-file", "_body_error": "x", "other": [1]}
    write(session_path, to_line(forged))
    assert queue.poll("bo") == [GOOD] == queue.tail()


@pytest.mark.requirement("FQ-03")
def test_a_body_that_looks_like_a_reference_is_a_body(queue: Queue, session_path: Path) -> None:
    side_file = queue.send("ask", "x" * 5000)
    (session_path / "secret.txt").write_text("secret")
    looks = [f"@file:{side_file}.txt", "@file:../secret.txt", "@file:/etc/passwd", "@file:", "@file:\0.txt"]
    for body in looks:
        queue.send("ask", body)
        write(session_path, to_line({**GOOD, "body": body}))
    first, *others = queue.poll("bo")
    assert (first["body"], first["_body_source"]) == ("x" * 5000, "side-file")
    assert [m["body"] for m in others] == [body for body in looks for _ in (1, 2)]
    assert not any("_body_source" in m or "_body_error" in m for m in others)


@pytest.mark.requirement("FQ-03")
@pytest.mark.parametrize(
    "kind", ["link", "folder", "pipe", "missing", "empty", "not utf-8", "long", "linked folder"]
)
def test_a_side_file_that_cannot_be_read_is_an_error_of_that_message_alone(
    queue: Queue, session_path: Path, tmp_path: Path, kind: str
) -> None:
    msg_id = queue.send("ask", "x" * 5000)
    queue.send("ask", "next")
    side_file = session_path / "bodies" / f"{msg_id}.txt"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / side_file.name).write_text("secret")
    side_file.unlink()
    if kind == "link":
        side_file.symlink_to(outside / side_file.name)
    elif kind == "folder":
        side_file.mkdir()
    elif kind == "pipe":
        os.mkfifo(side_file)
    elif kind == "empty":
        side_file.touch()
    elif kind == "not utf-8":
        side_file.write_bytes(b"\xff" * 5000)
    elif kind == "long":
        os.truncate(os.open(side_file, os.O_CREAT | os.O_RDWR), LINE_LIMIT + 1)
    elif kind == "linked folder":
        (session_path / "bodies").rmdir()
        (session_path / "bodies").symlink_to(outside)
    first, second = queue.poll("bo")
    assert (first["body"], second["body"]) == (f"@file:{msg_id}.txt", "next")
    assert first["_body_error"].startswith("the side-file ") and "_body_source" not in first
    assert queue.poll("bo") == []


@pytest.mark.long
@pytest.mark.requirement("FQ-05")
@pytest.mark.parametrize("ended", [True, False])
def test_a_line_of_hundreds_of_megabytes_is_skipped_and_never_held(
    queue: Queue, session_path: Path, ended: bool
) -> None:
    queue.send("ask", "before")
    path = session_path / "messages.jsonl"
    os.truncate(path, path.stat().st_size + 300 * 1024 * 1024)
    if ended:
        write(session_path, b"\n", to_line(GOOD))
    tracemalloc.start()
    got = [m["body"] for m in queue.poll("ann")]
    tail = [m["body"] for m in queue.tail()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got == tail == ["before", "hello"] if ended else ["before"]
    assert peak < 3 * LINE_LIMIT


@pytest.mark.requirement("FQ-05")
@settings(deadline=None)
@given(
    lines=st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=8),
    tail=st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"")),
    chunk=st.integers(1, 9),
    limit=st.integers(0, 12),
)
def test_reading_forward_and_backward_give_the_lines_whatever_the_pieces(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], tail: bytes, chunk: int, limit: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + tail)
    expected = [line if len(line) <= limit else None for line in lines]
    with path.open("rb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_files, "CHUNK_BYTES", chunk)
        patch.setattr(session_files, "LINE_LIMIT", limit)
        size = path.stat().st_size
        forward = list(session_files.complete_lines(file.fileno(), 0, size))
        assert [line for _, _, line in forward] == expected
        assert [path.read_bytes()[a:b] for a, b, _ in forward] == [line + b"\n" for line in lines]
        assert list(session_files.complete_lines_backward(file.fileno(), size)) == expected[::-1]
        for start in range(size + 1):
            whole = [line for a, _, line in forward if a >= start]
            found = [line for _, _, line in session_files.complete_lines(file.fileno(), start, size)]
            assert [line for line in found[-len(whole) :] if whole] == whole
            assert found[: len(found) - len(whole)] in ([], [None])


@pytest.mark.requirement("OP-54")
def test_a_byte_order_mark_is_skipped_and_utf_16_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    queue = Queue(tmp_path)
    queue.send("ask", "first", to="bo")
    marked = b"\xef\xbb\xbf" + to_line({**GOOD, "msg_id": "marked"})
    wide = b"\xff\xfe" + "".join(
        to_line({**GOOD, "msg_id": f"w{number}"}).decode() for number in range(3)
    ).encode("utf-16-le")
    with (tmp_path / "sessions" / "default" / "messages.jsonl").open("ab") as file:
        file.write(marked + wide + b"\n" + b"not json\n")
    queue.send("ask", "last", to="bo")
    status = queue.status()
    assert (status["messages"], status["utf16"], status["unparseable"]) == (3, 3, 5), "a half line ends UTF-16"
    assert main(["--root", str(tmp_path), "poll", "--agent", "bo"]) == 0
    out, err = capfd.readouterr()
    assert [json.loads(line)["body"] for line in out.splitlines()] == ["first", "hello", "last"]
    assert "3 new lines" in err and "UTF-16" in err and "UTF-8" in err
    assert queue.poll("ann") != [] and "UTF-16" in (queue.lines_error or "")
    assert queue.poll("ann") == [] and queue.lines_error is None
