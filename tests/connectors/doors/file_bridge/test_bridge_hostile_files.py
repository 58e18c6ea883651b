"""Hostile files in the queue's folder: the bridge reports a file that it cannot carry, and goes on."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from connectors.doors.file_bridge.records import Progress, progress_file
from connectors.log.publisher import Publisher
from schemas.streams.mailboxes.message import MAILBOX_VIEW, Message
from tests.broker_processes import wait_until
from tests.connectors.doors.file_bridge.bridge_run import BridgeRun, lines_of
from tests.connectors.doors.http_api.hub_stack import MESSAGES, one_of
from trunkline_agent.queue import Queue
from trunkline_agent.queue.message_record import to_line

MIB = 1024 * 1024
GOOD: dict[str, Any] = {
    "msg_id": "m-1",
    "ts": "2026-11-22T10:00:00.000000Z",
    "from": "ann",
    "to": "bo",
    "topic": "ask",
    "body": "x",
    "in_reply_to": None,
    "ttl_s": None,
}


def line(**fields: object) -> bytes:
    """A line of the queue, without its newline."""
    return to_line({**GOOD, **fields})[:-1]


def stuck_in(run: BridgeRun) -> dict[str, str]:
    """The sessions that the bridge has noted for the doctor."""
    return Progress.load(progress_file(run.settings)).stuck


@pytest.mark.requirement("FQ-15")
def test_of_hostile_lines_each_is_refused_with_a_reason_or_carried_and_none_stops_the_rest(
    run: BridgeRun,
) -> None:
    run.queue.send("ask", "before", to="cy", sender="ann")
    refused = [
        b"not json",
        b"\x00\xff\xfe" * 50,
        b"[" * 100_000,
        b'{"msg_id":' * 500,
        line(msg_id="../../etc/passwd"),
        line(to="../bo"),
        line(**{"from": "a/b"}),
        line(topic="rm -rf"),
        line(msg_id="n" * 129),
        line(body=1),
        line() + b" trailing",
        line(ts="yesterday"),
    ]
    run.write(*refused)
    # Times that UTC has no year for, before the year 1 and after 9999.
    early, late = (
        line(msg_id="early", ts="0001-01-01T00:00:00+14:00", ttl_s=5),
        line(msg_id="late", ts="9999-12-31T23:59:59-14:00", ttl_s=5),
    )
    run.write(early, late, line(msg_id="old", ts="0099-01-01T00:00:00Z", ttl_s=5))
    run.write(
        line(msg_id="mine", to="bo", via="trunkline"), line(msg_id="twice"), line(msg_id="twice", body="other")
    )
    long = run.queue.send("ask", "ü" * MIB, to="bo", sender="ann")
    lost = run.queue.send("ask", "y" * 5000, to="cy", sender="ann", session="other")
    (run.session("other") / "bodies" / f"{lost}.txt").unlink()
    with (run.session() / "messages.jsonl").open("ab") as file:
        file.write(b'{"msg_id":"torn')
    after = run.queue.send("ask", "after", to="dan", sender="ann")
    run.wait_mailbox("dan", {after})
    wait_until(lambda: len(run.refused()) >= len(refused) + 2, 20, "the lines are refused")
    wait_until(lambda: len(run.mailbox("bo")) >= 5, 20, "what can be carried is in the mailbox")
    assert set(run.mailbox("bo")) == {"early", "late", "old", "twice", long}
    assert run.mailbox("bo")["twice"]["body"] == "x"

    assert run.mailbox("bo")[long]["blob_bytes"] == 2 * MIB
    kept = run.refused()
    prefixes = [one[:1024] for one in [*refused, b'{"msg_id":"torn']]
    assert [kept.count(one) for one in prefixes] == [1] * len(prefixes)
    assert one_of([one for one in kept if one not in prefixes]).startswith(b'{"msg_id":"' + lost.encode())
    assert run.mailbox("cy", "other") == {}
    assert run.says("lines_refused", session="default") and run.says("line_not_carried", msg_id=lost)
    assert run.bridge.process.poll() is None


def ids_in(run: BridgeRun) -> list[str]:
    """The ids in the default session's file; a file may be there before its first line."""
    there = (run.session() / "messages.jsonl").exists()
    return [one["msg_id"] for one in lines_of(run.root)] if there else []


@pytest.mark.requirement("FQ-16")
def test_forged_lines_of_the_audit_are_passed_over(run: BridgeRun) -> None:
    poll = {"ts": GOOD["ts"], "op": "poll", "session": "default", "agent_id": "bo", "msg_ids": ["m-1"]}
    forged: list[dict[str, Any]] = [
        {"session": "a/b"},
        {"agent_id": ".."},
        {"msg_ids": ["../x"]},
        {"msg_ids": ["n" * 200]},
        {"msg_ids": "m-1"},
        {"msg_ids": [1]},
        {"ts": "\ud800"},
    ]
    run.queue.send("ask", "x", to="bo", sender="ann")
    lines = [json.dumps({**poll, **change}).encode() for change in forged]
    with run.queue.audit_path.open("ab") as file:
        file.write(b"".join(one + b"\n" for one in [*lines, b"[" * 100_000, b"\xff", b"null"]))
    taken = run.queue.send("ask", "y", to="cy", sender="ann")
    run.queue.poll("cy")
    run.wait_mailbox("cy", {taken}, status="claimed")
    # A folder in its place is no reason to carry nothing.
    run.queue.audit_path.unlink()
    run.queue.audit_path.mkdir()
    run.wait_look()
    assert run.bridge.process.poll() is None


@pytest.mark.requirement("FQ-15")
@pytest.mark.requirement("FQ-18")
def test_a_session_that_cannot_be_read_waits_and_the_others_go_on_in_both_directions(
    run: BridgeRun, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "cursors").mkdir(parents=True)
    (outside / "messages.jsonl").write_bytes(line() + b"\n")
    # By name before all others.
    waiting = run.queue.send("ask", "mend me", to="bo", sender="ann", session="a0")
    run.wait_mailbox("bo", {waiting}, "a0")
    messages = run.session("a0") / "messages.jsonl"
    aside = messages.rename(run.session("a0") / "aside")
    messages.symlink_to(outside / "messages.jsonl")
    (run.session("a0") / "cursors" / "bo.cursor").write_text("0\n")
    (run.root / "sessions" / "a1").symlink_to(outside)
    run.queue.send("ask", "x", to="bo", sender="ann", session="a2")
    (run.session("a2") / ".lock").unlink()
    (run.session("a2") / ".lock").mkdir()
    run.wait_look()
    bob = run.principal("bob")
    assert run.queue.poll("bob") == []
    posted = run.operator.post(MESSAGES, json={"recipient": "bob", "type": "note", "payload": {}}).json()
    wait_until(lambda: ids_in(run), 20, "the message is in the file")
    assert one_of(lines_of(run.root))["msg_id"] == posted["message_id"]
    run.queue.poll("bob")
    run.wait_mailbox("bob", {posted["message_id"]}, status="claimed")
    bob.close()
    assert [path.name for path in (outside / "cursors").iterdir()] == []
    assert run.mailbox("bo", "a1") == {}
    for name in ("a0", "a1", "a2"):
        assert run.says("session_waits", session=name), name
    assert len(run.says("session_waits", session="a0")) < 4
    wait_until(lambda: {"a0", "a2"} <= stuck_in(run).keys(), 20, "the doctor is told")
    # Mended, it is carried.
    messages.unlink()
    aside.rename(messages)
    later = run.queue.send("ask", "mended", to="bo", sender="ann", session="a0")
    run.wait_mailbox("bo", {waiting, later}, "a0")
    wait_until(lambda: "a0" not in stuck_in(run), 20, "the doctor is told")


@pytest.mark.requirement("FQ-16")
def test_what_is_polled_in_a_session_that_waits_is_claimed_when_it_is_carried(run: BridgeRun) -> None:
    first = run.queue.send("ask", "one", to="bo", sender="ann")
    run.wait_mailbox("bo", {first})
    cursor = run.session() / "cursors" / "trunkline-bridge.cursor"
    run.kill()
    cursor.unlink(missing_ok=True)  # killed before it had written it, perhaps
    cursor.mkdir(parents=True)
    run.start()
    second = run.queue.send("ask", "two", to="bo", sender="ann")
    assert [message["msg_id"] for message in run.queue.poll("bo")] == [first, second]
    other = run.queue.send("ask", "three", to="cy", sender="ann", session="s1")
    run.queue.poll("cy", session="s1")
    run.wait_mailbox("cy", {other}, "s1", status="claimed")
    # Also by a bridge that has not seen the poll itself.
    run.kill()
    run.start()
    run.wait_look()
    assert run.mailbox("bo")[first]["status"] == "unread"
    cursor.rmdir()
    run.wait_mailbox("bo", {first, second}, status="claimed")


@pytest.mark.requirement("FQ-15")
def test_old_lines_wait_while_the_mailbox_view_cannot_be_read_and_new_ones_do_not(run: BridgeRun) -> None:
    log_folder = Path(run.settings.table_path(MAILBOX_VIEW)) / "_delta_log"
    log_folder.mkdir(parents=True)
    (log_folder / "00000000000000000000.json").write_text("no table")
    first = run.queue.send("ask", "x", to="bo", sender="ann", session="a0")
    run.wait_mailbox("bo", {first}, "a0")
    run.write(line(msg_id="m-old", ts="2020-01-01T00:00:00Z"), session="a0")
    run.wait_look()
    wait_until(lambda: run.says("session_waits", session="a0"), 20, "it waits")
    assert set(run.mailbox("bo", "a0")) == {first}
    shutil.rmtree(log_folder)
    run.wait_mailbox("bo", {first, "m-old"}, "a0")


@pytest.mark.requirement("FQ-15")
def test_a_cursor_of_the_bridge_that_is_not_whole_means_that_all_is_carried_again(run: BridgeRun) -> None:
    first = run.queue.send("ask", "one", to="bo", sender="ann")
    run.wait_mailbox("bo", {first})
    run.kill()
    (run.session() / "cursors" / "trunkline-bridge.cursor").write_text("00")
    second = run.queue.send("ask", "two", to="bo", sender="ann")
    run.start()
    run.wait_mailbox("bo", {first, second})
    assert run.verdicts()["mailbox/default/bo", first, "accepted"] == 1


def is_removed(folder: Path) -> bool:
    """Remove a folder; whether it is gone. The bridge may write into it meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.mark.requirement("FQ-15")
@pytest.mark.requirement("FQ-17")
def test_a_session_that_is_deleted_and_made_again_begins_anew(run: BridgeRun) -> None:
    bob = run.principal("bob")
    bob.close()
    run.queue.poll("bob")
    run.queue.poll("bo", session="s1")
    before = run.queue.send("broadcast", "before", sender="ann", session="s1")
    run.wait_mailbox("bo", {before}, "s1")
    note = {"recipient": "bob", "type": "note", "payload": {"n": 1}}
    ids = [run.operator.post(MESSAGES, json=note).json()["message_id"]]
    wait_until(lambda: ids_in(run), 20, "it is in the file")
    for name in ("default", "s1"):
        wait_until(lambda name=name: is_removed(run.session(name)), what="the session is removed")
    run.wait_look()
    ids.append(run.operator.post(MESSAGES, json=note).json()["message_id"])
    run.wait_look()
    assert not run.session().exists()
    # A message that no reader took comes again. An agent that no longer reads there gets no more messages.
    assert run.queue.poll("bob") == []
    wait_until(
        lambda: (run.session() / "messages.jsonl").exists() and len(lines_of(run.root)) == 2,
        20,
        "both are there",
    )
    assert [message["msg_id"] for message in run.queue.poll("bob")] == ids
    run.queue.poll("cy", session="s1")
    after = run.queue.send("broadcast", "after", sender="ann", session="s1")
    run.wait_mailbox("cy", {after}, "s1")
    assert set(run.mailbox("bo", "s1")) == {before}


@pytest.mark.requirement("FQ-17")
def test_a_message_that_no_line_can_hold_does_not_keep_the_next_one_back(run: BridgeRun) -> None:
    run.queue.poll("all")
    everybody = run.principal("all")
    everybody.close()
    bob = run.principal("bob")
    bob.close()
    run.queue.poll("bob")
    odd = {"message_id": "odd", "from": "ann", "to": "bob", "kind": "note", "body": "x"}
    moments = {"early": "0001-01-01T00:00:00+14:00", "old": "0099-01-01T00:00:00Z", "never": "soon"}
    with Publisher(run.settings) as publisher:
        for message_id, moment in moments.items():
            said = Message.model_validate({**odd, "message_id": message_id, "sent_at": moment})
            publisher.append(said.record(door="mqtt", principal="ann")).result(20)
    for recipient in ("all", "bob"):
        note = {"recipient": recipient, "type": "note", "payload": {}}
        last = run.operator.post(MESSAGES, json=note).json()["message_id"]

    wait_until(lambda: last in ids_in(run), 20, "the last one is in the file")
    # "all" in a line is everybody: what is for an agent of that name must not get there.
    assert set(ids_in(run)) == {*moments, last}
    assert run.says("mailboxes_failed") == []


@pytest.mark.requirement("FQ-15")
@pytest.mark.timeout(180)
def test_long_side_files_are_not_all_held_at_once(run: BridgeRun) -> None:
    run.wait_look()
    process = psutil.Process(run.bridge.process.pid)
    before = process.memory_info().rss
    queue = Queue(run.root, fsync=False)
    run.kill()
    for _ in range(40):
        last = queue.send("ask", "x" * (6 * MIB), to="bo", sender="ann", session="s1")
    run.start()
    status = Path(f"/proc/{run.bridge.process.pid}/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    wait_until(lambda: run.verdicts()["mailbox/s1/bo", last, "accepted"] == 1, 20, "all are carried")
    assert peak - before < 120 * MIB, (before / MIB, peak / MIB)


@pytest.mark.requirement("FQ-15")
@pytest.mark.timeout(180)
def test_a_long_session_does_not_keep_the_others_or_the_end_waiting(run: BridgeRun) -> None:
    run.queue.send("ask", "x", to="bo", sender="ann", session="a-long-one")
    run.kill()
    run.write(*(line(msg_id=f"m-{number}") for number in range(30_000)), session="a-long-one")
    small = run.queue.send("ask", "y", to="cy", sender="ann", session="small")
    cursor = run.session("small") / "cursors" / "trunkline-bridge.cursor"
    run.bridge = run.started()
    wait_until(cursor.exists, 60, "the small one is carried")
    run.queue.poll("cy", session="small")

    def claimed() -> bool:
        file = run.settings.data_path / "file_bridge" / "progress.json"
        noted = json.loads(file.read_text())["audit"][1] if file.exists() else 0
        return bool(noted == run.queue.audit_path.stat().st_size)

    wait_until(claimed, 60, "the poll is a claim")
    assert run.bridge.stop(timeout_s=5) == 0
    assert 0 < run.carried() < run.written()
    run.wait_mailbox("cy", {small}, "small", status="claimed")
    run.bridge = run.started()
    run.bridge.wait_ready(120)  # when all of it is carried
    assert run.carried() == run.written()
    assert (run.session("small") / "messages.jsonl").stat().st_size == int(cursor.read_text())


@pytest.mark.requirement("FQ-15")
@pytest.mark.requirement("FQ-17")
def test_who_holds_the_lock_of_a_session_keeps_that_one_waiting_and_no_other(run: BridgeRun) -> None:
    run.principal("bob").close()
    run.queue.poll("bob")
    held = run.queue.send("ask", "one", to="bo", sender="ann", session="a0")
    run.wait_mailbox("bo", {held}, "a0")
    run.write(line(), session="a0")
    with (run.session("a0") / ".lock").open("rb") as lock, (run.session() / ".lock").open("rb") as own:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sent = run.queue.send("ask", "two", to="cy", sender="ann", session="s1")
        run.wait_mailbox("cy", {sent}, "s1")
        run.wait_look()
        assert set(run.mailbox("bo", "a0")) <= {held, "m-1"}
        fcntl.flock(own, fcntl.LOCK_EX)
        note = {"recipient": "bob", "type": "note", "payload": {}}
        message_id = run.operator.post(MESSAGES, json=note).json()["message_id"]
        wait_until(lambda: run.says("reader_waits", session="default"), 20, "the reader waits")
        run.wait_look()
    wait_until(lambda: ids_in(run), 20, "it is in the file")
    assert one_of(lines_of(run.root))["msg_id"] == message_id
    run.wait_mailbox("bo", {held, "m-1"}, "a0")
