"""Sending and polling: topics, recipients, times to live, cursors, names (FQ-01 to FQ-04, FQ-07, FQ-12)."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from trunkline_agent.queue import TOPICS, Queue, QueueDisabledError, QueueError, TopicError, message_record
from trunkline_agent.wire.ids import NAME_LIMIT
from trunkline_agent.wire.ids import is_name as is_name_by_cm_01

FIELDS = ["msg_id", "ts", "from", "to", "topic", "body", "in_reply_to", "ttl_s"]


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["body"] for message in messages]


@pytest.mark.requirement("FQ-01")
def test_the_topics_are_closed_for_sending_and_as_a_filter(queue: Queue) -> None:
    assert isinstance(TOPICS, frozenset)
    assert {"ask", "answer", "broadcast", "spawn-request", "status"} == TOPICS
    for topic in sorted(TOPICS):
        queue.send(topic, topic)
    for wrong in ("", "Ask", "ask ", None, 1):
        with pytest.raises(TopicError):
            queue.send(wrong, "x")  # type: ignore[arg-type]
        with pytest.raises(TopicError):
            queue.poll("ann", ["ask", wrong])  # type: ignore[list-item]
    assert bodies(queue.poll("ann")) == sorted(TOPICS)


@pytest.mark.requirement("FQ-02")
def test_a_message_is_one_line_of_json_with_eight_fields(queue: Queue, session_path: Path) -> None:
    before = time.time()
    msg_id = queue.send("answer", "yes\n…\x9b", to="bo", ttl_s=2.5, sender="ann", reply_to="q-1")
    text = (session_path / "messages.jsonl").read_text(encoding="utf-8")
    record = json.loads(text)
    assert text.count("\n") == 1 and "\x9b" not in text and "…" in text
    assert list(record) == FIELDS
    assert record == {
        "msg_id": msg_id,
        "ts": record["ts"],
        "from": "ann",
        "to": "bo",
        "topic": "answer",
        "body": "yes\n…\x9b",
        "in_reply_to": "q-1",
        "ttl_s": 2.5,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", record["ts"])
    assert before - 0.001 <= message_record._seconds(record["ts"]) <= time.time()  # type: ignore[operator]
    assert queue.poll("bo") == [record]


@pytest.mark.requirement("FQ-02")
@pytest.mark.requirement("DL-06")
def test_a_thread_is_a_ninth_field_and_only_of_a_message_that_was_given_one(
    queue: Queue, session_path: Path
) -> None:
    queue.send("ask", "without", to="bo", thread=None)
    queue.send("ask", "with", to="bo", thread="talk-1")
    first, second = (session_path / "messages.jsonl").read_text(encoding="utf-8").splitlines()
    assert list(json.loads(first)) == FIELDS
    assert list(json.loads(second)) == [*FIELDS, "thread"]
    assert queue.tail() == [json.loads(first), json.loads(second)] == queue.poll("bo")
    for wrong in ("", "a b", "../x", 1, "x" * 129):
        with pytest.raises(ValueError, match="the thread"):
            queue.send("ask", "x", thread=wrong)  # type: ignore[arg-type]


@pytest.mark.requirement("FQ-05")
@pytest.mark.requirement("DL-06")
@pytest.mark.parametrize("thread", [None, "", "a b", 1, {"id": "t"}, ["t"], True])
def test_a_line_whose_thread_is_no_name_is_a_message_without_a_thread(
    queue: Queue, session_path: Path, thread: Any
) -> None:
    queue.send("ask", "x", to="bo", thread="t")
    path = session_path / "messages.jsonl"
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "thread": thread}) + "\n")
    del line["thread"]
    assert queue.poll("bo") == [line]


@pytest.mark.requirement("FQ-02")
@pytest.mark.parametrize(("to", "gets"), [(None, "ab"), ("all", "ab"), ("broadcast", "ab"), ("a", "a")])
def test_a_message_without_a_recipient_is_for_every_consumer(queue: Queue, to: str | None, gets: str) -> None:
    queue.send("ask", "x", to=to)
    assert [agent for agent in "ab" if queue.poll(agent)] == list(gets)


@pytest.mark.requirement("FQ-02")
def test_a_message_is_delivered_until_its_time_has_run_out(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    send_gone(queue, "ask", "gone")
    for ttl_s in (None, 10, 10.5, 366 * 86_400):
        queue.send("ask", str(ttl_s), ttl_s=ttl_s)
    assert bodies(queue.poll("early")) == ["None", "10", "10.5", "31622400"]
    monkeypatch.setattr(time, "time", lambda: now + 10.4)
    assert bodies(queue.poll("late")) == ["None", "10.5", "31622400"]
    for wrong in (-1, 0, 366 * 86_400 + 1, float("nan"), float("inf"), True, "1", 10**400):
        with pytest.raises(ValueError, match="ttl_s"):
            queue.send("ask", "x", ttl_s=wrong)  # type: ignore[arg-type]


@pytest.mark.requirement("FQ-04")
def test_a_poll_gives_each_message_once_in_order_and_its_cursor_is_on_the_disk(
    queue: Queue, session_path: Path
) -> None:
    sent = [queue.send("ask", str(number)) for number in range(5)]
    assert [m["msg_id"] for m in queue.poll("ann")] == sent
    assert queue.poll("ann") == [] == Queue(queue.root).poll("ann")
    size = (session_path / "messages.jsonl").stat().st_size
    assert int((session_path / "cursors" / "ann.cursor").read_text()) == size
    queue.send("ask", "more")
    assert bodies(queue.poll("ann")) == ["more"]
    assert bodies(queue.poll("bo")) == [*map(str, range(5)), "more"]


@pytest.mark.requirement("FQ-04")
def test_a_filter_consumes_what_it_leaves_out(queue: Queue) -> None:
    queue.send("ask", "a")
    queue.send("status", "s")
    queue.send("ask", "to somebody else", to="bo")
    assert bodies(queue.poll("ann", ["status", "answer"])) == ["s"]
    assert queue.poll("ann") == []
    queue.send("ask", "b")
    assert bodies(queue.poll("ann", "ask")) == ["b"]


@pytest.mark.requirement("FQ-04")
def test_the_cursor_is_on_the_disk_before_the_messages_are_handed_out(tmp_path: Path, monkeypatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(fd: int) -> None:
        done.append("fsync " + Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    def seen_replace(old: str, new: str, **folders: int) -> None:
        done.append(f"replace {new}")
        replace(old, new, **folders)

    queue = Queue(tmp_path / "q", step=done.append)
    queue.send("ask", "x")
    queue.poll("ann")
    queue.send("ask", "y")
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    done.clear()
    assert bodies(queue.poll("ann")) == ["y"]
    assert done == [
        *("fsync messages.jsonl", "scanned", "fsync .ann.cursor.new", "replace ann.cursor", "fsync cursors"),
        *("cursor_written", "audited"),
    ]


@pytest.mark.requirement("FQ-04")
def test_two_sessions_have_nothing_in_common(queue: Queue) -> None:
    queue.send("ask", "one", session="s1")
    queue.send("ask", "two", session="s2")
    assert bodies(queue.poll("ann", session="s1")) == ["one"]
    assert bodies(queue.poll("ann", session="s2")) == ["two"]
    assert queue.poll("ann") == []


@pytest.mark.requirement("FQ-07")
def test_a_look_at_the_tail_takes_nothing_and_is_not_audited(queue: Queue, session_path: Path) -> None:
    for number in range(12):
        send_gone(queue, "ask", str(number)) if number % 2 else queue.send("ask", str(number))
    audit = queue.audit_path.read_bytes()
    assert bodies(queue.tail()) == ["0", "2", "4", "6", "8", "10"]
    assert bodies(queue.tail(3)) == ["6", "8", "10"]
    assert bodies(queue.tail(3, include_expired=True)) == ["9", "10", "11"]
    assert queue.tail(0) == [] == queue.tail(5, session="none")
    assert queue.audit_path.read_bytes() == audit
    assert list((session_path / "cursors").iterdir()) == []
    for wrong in (-1, "1", 1.0, True):
        with pytest.raises(ValueError, match="n must be"):
            queue.tail(wrong)  # type: ignore[arg-type]


@pytest.mark.requirement("FQ-07")
def test_the_status_counts_one_session_or_all_and_changes_nothing(queue: Queue) -> None:
    assert queue.status()["sessions"] == {}
    assert not queue.root.exists()
    queue.send("ask", "x" * 5000, session="s1")
    send_gone(queue, "answer", "y", session="s1")
    queue.send("ask", "z", session="s2")
    queue.poll("ann", session="s1")
    one = queue.status("s1")
    folder = queue.root / "sessions" / "s1"
    size = (folder / "messages.jsonl").stat().st_size
    assert (one["messages"], one["expired"], one["unparseable"], one["bytes"]) == (2, 1, 0, size + 5000)
    assert one["per_topic"] == {"ask": 1, "answer": 1, "broadcast": 0, "spawn-request": 0, "status": 0}
    assert one["sessions"]["s1"]["cursors"] == {"ann": size}
    everything = queue.status()
    assert (everything["messages"], sorted(everything["sessions"])) == (3, ["s1", "s2"])
    assert queue.status("none")["messages"] == 0
    assert not (queue.root / "sessions" / "none").exists()


@pytest.mark.requirement("FQ-12")
def test_the_errors_have_the_bases_that_callers_catch() -> None:
    assert issubclass(TopicError, QueueError) and issubclass(TopicError, ValueError)
    assert issubclass(QueueDisabledError, QueueError) and issubclass(QueueDisabledError, RuntimeError)


@pytest.mark.requirement("FQ-12")
@pytest.mark.parametrize("wrong", ["", ".", "..", "a/b", "../x", "-a", "a\n", "ä", "a b", "x" * 129, 5, "a\0"])
def test_what_is_no_name_raises_and_reaches_no_file(queue: Queue, wrong: Any) -> None:
    calls = [
        lambda: queue.send("ask", "x", session=wrong),
        lambda: queue.send("ask", "x", sender=wrong),
        lambda: queue.send("ask", "x", to=wrong),
        lambda: queue.send("ask", "x", reply_to=wrong),
        lambda: queue.send("ask", "x", thread=wrong),
        lambda: queue.poll(wrong),
        lambda: queue.poll("ann", session=wrong),
        lambda: queue.tail(1, session=wrong),
        lambda: queue.expire(wrong),
        lambda: queue.status(wrong),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is not a name"):
            call()
    assert not queue.root.exists()


@pytest.mark.requirement("DL-42")
@pytest.mark.parametrize("wrong", ["", "a\nb", "x" * 201, 5, "\x9b", "\u2028"])
def test_a_subject_is_kept_refused_at_once_and_left_out_of_the_line_of_another_program(
    queue: Queue, session_path: Path, wrong: Any
) -> None:
    with pytest.raises(ValueError, match="the subject: expected one line of 1 to 200 characters"):
        queue.send("ask", "x", subject=wrong)
    with pytest.raises(TypeError, match="no field 'subjekt'"):
        queue.send("ask", "x", subjekt="x")
    assert not queue.root.exists()
    queue.send("ask", "x", subject="tea ☃")
    line = session_path / "messages.jsonl"
    said = json.loads(line.read_text())
    line.write_text(json.dumps(said) + "\n" + json.dumps({**said, "msg_id": "m-2", "subject": wrong}) + "\n")
    assert [one.get("subject") for one in queue.poll("ann")] == ["tea ☃", None]


@pytest.mark.requirement("FQ-12")
@settings(deadline=None)
@given(st.text(max_size=200) | st.from_regex(r"[A-Za-z0-9._\-]{0,140}", fullmatch=True))
def test_a_name_is_what_cm_01_says(text: str) -> None:
    assert message_record.is_name(text) == is_name_by_cm_01(text)
    assert not message_record.is_name("x" * (NAME_LIMIT + 1)) and message_record.is_name("x" * NAME_LIMIT)


@pytest.mark.requirement("FQ-02")
@pytest.mark.parametrize(
    "wrong",
    [None, b"x", 5, "\ud800", "x" * (16 * 1024 * 1024 + 1)],
    ids=["None", "bytes", "number", "surrogate", "long"],
)
def test_a_body_that_is_no_text_is_refused(queue: Queue, wrong: Any) -> None:
    with pytest.raises(ValueError, match="the body"):
        queue.send("ask", wrong)


@pytest.mark.requirement("FQ-02")
@settings(deadline=None)
@given(body=st.text(max_size=50))
def test_every_text_arrives_as_it_was_sent(tmp_path_factory: pytest.TempPathFactory, body: str) -> None:
    queue = Queue(tmp_path_factory.mktemp("q"), fsync=False, body_threshold=20)
    queue.send("ask", body)
    assert bodies(queue.poll("ann")) == [body]
