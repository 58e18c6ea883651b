"""Delayed messages and priorities of the file queue (DL-22, FQ-04)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.connectors.agent_sdk.agent_queue.queue_process import killed
from trunkline_agent.queue import Queue, QueueError
from trunkline_agent.queue.command_line import main
from trunkline_agent.queue.message_record import parse_line

LONG = "long" * 2000


@pytest.fixture(name="clock")
def settable_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds by which the clock of every queue in this process is ahead."""
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    return ahead


def bodies(queue: Queue, agent: str) -> list[str]:
    """The bodies that a poll returns."""
    return [message["body"] for message in queue.poll(agent)]


def delayed_files(session_path: Path) -> list[Path]:
    """The files of delayed messages."""
    return sorted((session_path / "delayed").iterdir())


@pytest.mark.requirement("DL-22")
def test_a_delayed_message_comes_after_its_time_once_to_each_reader(
    queue: Queue, clock: list[float], session_path: Path
) -> None:
    queue.send("ask", "now")
    sent = queue.send("ask", LONG, deliver_after_s=60)
    assert bodies(queue, "ann") == ["now"]
    # A reader that knows nothing of delays finds no line and no side-file, and deletes none.
    assert sent not in (session_path / "messages.jsonl").read_text()
    assert list((session_path / "bodies").iterdir()) == []
    assert queue.status()["delayed"] == 1
    clock[0] = 59
    assert bodies(queue, "ann") == []
    clock[0] = 61
    assert bodies(queue, "ann") == [LONG]
    assert bodies(queue, "bo") == ["now", LONG]
    assert bodies(queue, "ann") == []
    assert queue.status()["delayed"] == 0
    assert [message["msg_id"] for message in queue.tail(1)] == [sent]
    released = [json.loads(line) for line in queue.audit_path.read_text().splitlines()]
    assert [line["msg_ids"] for line in released if line["op"] == "release"] == [[sent]]


@pytest.mark.requirement("DL-22")
def test_delayed_messages_become_lines_in_the_order_of_their_times(queue: Queue, clock: list[float]) -> None:
    for delay in (30, 10, 20):
        queue.send("ask", str(delay), deliver_after_s=delay)
    clock[0] = 31
    assert queue.release() == 3
    assert bodies(queue, "ann") == ["10", "20", "30"]
    assert queue.release() == 0
    with pytest.raises(QueueError, match="No such file"):
        queue.release("elsewhere")


@pytest.mark.requirement("DL-22")
def test_more_messages_than_a_batch_are_released_at_once(queue: Queue, clock: list[float]) -> None:
    for number in range(120):
        queue.send("ask", str(number), deliver_after_s=1)
    clock[0] = 2
    assert bodies(queue, "ann") == [str(number) for number in range(120)]


@pytest.mark.requirement("DL-21")
def test_a_message_that_expired_before_anybody_released_it_never_comes(
    queue: Queue, clock: list[float], session_path: Path
) -> None:
    queue.send("ask", "late", deliver_after_s=10, ttl_s=20)
    clock[0] = 21
    assert bodies(queue, "ann") == []
    assert delayed_files(session_path) == []


@pytest.mark.requirement("DL-22")
@pytest.mark.parametrize(
    ("delay", "ttl"),
    [
        (0, None),
        (-1, None),
        ("1", None),
        (True, None),
        (float("nan"), None),
        (400 * 86400, None),
        (5, 5),
        (5, 1),
    ],
)
def test_a_delay_that_no_mailbox_takes_is_refused(queue: Queue, delay: float, ttl: float | None) -> None:
    with pytest.raises(ValueError, match="deliver"):
        queue.send("ask", "x", deliver_after_s=delay, ttl_s=ttl)


@pytest.mark.requirement("DL-22")
@pytest.mark.parametrize(("step", "arrives"), [("half_a_delayed_message", False), ("delayed", True)])
def test_a_sender_killed_anywhere_leaves_a_whole_delayed_message_or_none(
    queue: Queue, session_path: Path, step: str, arrives: bool
) -> None:
    assert killed(queue.root, "send later", step) == ""
    time.sleep(0.01)
    assert bodies(queue, "ann") == (["killed" * 1000] if arrives else [])
    assert delayed_files(session_path) == []


@pytest.mark.requirement("DL-22")
@pytest.mark.parametrize(
    "step",
    [
        *("release_marked", "due_side_file_written", "half_a_side_file", "half_a_line", "due_appended"),
        *("delayed_deleted", "mark_removed"),
    ],
)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_release_killed_anywhere_loses_nothing_and_repeats_nothing(queue: Queue, step: str, nth: int) -> None:
    queue.send("ask", "before")
    sent = ["killed a" * 1000, "small", "killed b" * 1000]
    for body in sent:
        queue.send("ask", body, deliver_after_s=0.001)
    time.sleep(0.01)
    is_once = step in ("release_marked", "delayed_deleted", "mark_removed") or step.startswith("half")
    killed(queue.root, "poll", step, 1 if is_once else nth)
    assert bodies(queue, "ann") == ["before", *sent]
    assert bodies(queue, "bo") == ["before", *sent]
    assert bodies(queue, "ann") == []


@pytest.mark.requirement("DL-22")
def test_a_release_killed_before_its_newline_alone_does_not_write_the_line_again(
    queue: Queue, session_path: Path
) -> None:
    queue.send("ask", "torn", deliver_after_s=0.001)
    time.sleep(0.01)
    killed(queue.root, "poll", "due_appended")
    messages = session_path / "messages.jsonl"
    messages.write_bytes(messages.read_bytes().removesuffix(b"\n"))
    assert bodies(queue, "ann") == ["torn"]
    assert messages.read_bytes().count(b"torn") == 1


@pytest.mark.requirement("DL-22")
def test_a_file_that_is_no_delayed_message_is_put_aside_and_stops_nothing(
    queue: Queue, session_path: Path
) -> None:
    queue.send("ask", "good", deliver_after_s=0.001)
    delayed = session_path / "delayed"
    (delayed / f"{1:017d}-bad.json").write_text("{")
    other = json.loads(delayed_files(session_path)[-1].read_text())
    (delayed / f"{2:017d}-other.json").write_text(json.dumps(other))
    (delayed / f"{3:017d}-link.json").symlink_to(session_path / "messages.jsonl")
    (delayed / f"{4:017d}-folder.json").mkdir()
    (delayed / "unrelated").write_text("x")
    time.sleep(0.01)
    assert bodies(queue, "ann") == ["good"]
    named = {path.name.partition("-")[2] for path in delayed_files(session_path)}
    assert named == {"bad.json.bad", "other.json.bad", "link.json.bad", "folder.json.bad", ""}
    assert bodies(queue, "ann") == []


@pytest.mark.requirement("FQ-09")
def test_the_kill_switch_keeps_delayed_messages_delayed(
    queue: Queue, session_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send("ask", "x", deliver_after_s=0.001)
    time.sleep(0.01)
    monkeypatch.setenv("TRUNKLINE_QUEUE_DISABLED", "1")
    assert queue.release() == 0
    assert len(delayed_files(session_path)) == 1


@pytest.mark.requirement("FQ-04")
def test_a_poll_returns_higher_priorities_first_and_else_the_oldest(queue: Queue) -> None:
    for number, priority in enumerate(["low", None, "high", "normal", "low", "high"]):
        queue.send("ask", f"{number} {priority}", priority=priority)
    assert bodies(queue, "ann") == ["2 high", "5 high", "1 None", "3 normal", "0 low", "4 low"]
    with pytest.raises(ValueError, match="there is no priority 'urgent'"):
        queue.send("ask", "x", priority="urgent")


@pytest.mark.requirement("FQ-04")
@pytest.mark.parametrize("priority", ["urgent", 1, None, ["high"], {}])
def test_a_line_with_an_unknown_priority_is_a_message_without_one(queue: Queue, priority: object) -> None:
    queue.send("ask", "x")
    line = json.loads((queue.root / "sessions" / "default" / "messages.jsonl").read_text())
    message = parse_line(json.dumps({**line, "priority": priority}).encode())
    assert message is not None
    assert "priority" not in message


@pytest.mark.requirement("FQ-14")
def test_the_command_line_sends_with_a_delay_and_a_priority(
    queue: Queue, clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(queue.root)]
    options = ["--priority", "high", "--deliver-after-s", "60", "--ttl-s", "90"]
    assert main([*root, "send", "--topic", "ask", "--body", "later", *options]) == 0
    sent = capfd.readouterr().out.strip()
    clock[0] = 61
    assert main([*root, "poll", "--agent", "ann"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["msg_id"], shown["priority"], shown["ttl_s"]) == (sent, "high", 90)
    assert main([*root, "send", "--topic", "ask", "--body", "x", "--deliver-after-s", "0"]) == 2
