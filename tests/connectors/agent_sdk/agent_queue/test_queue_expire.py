"""Expire: what goes, what stays, and that every cursor stays at its place, also when it is killed (FQ-08)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from tests.connectors.agent_sdk.agent_queue.queue_process import killed
from tests.connectors.agent_sdk.agent_queue.test_queue_hostile_lines import GOOD, to_line, write
from trunkline_agent.queue import Queue, QueueError

pytestmark = [pytest.mark.requirement("FQ-08"), pytest.mark.long]

AGENTS = ("ann", "bo", "cy")
STEPS = [
    *("half_a_copy", "new_file_written", "before_replacing_expire.plan", "planned", "replaced"),
    *(
        "half_a_cursor",
        "before_replacing_.cursor",
        "cursor_moved",
        "side_files_removed",
        "plan_removed",
        "audited",
    ),
]
NEXT = ["poll", "send small", "expire"]


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [message["msg_id"] for message in messages]


def fill(queue: Queue) -> tuple[list[str], dict[str, list[str]]]:
    """Twelve messages, every second one expired, some in side-files; bo has read half, cy all of them."""
    live: list[str] = []
    got: dict[str, list[str]] = {agent: [] for agent in AGENTS}
    for number in range(12):
        expired = number % 2 == 0
        body = "x" * (5000 if number % 3 == 0 else 10)
        msg_id = send_gone(queue, "ask", body) if expired else queue.send("ask", body)
        if not expired:
            live.append(msg_id)
        if number == 6:
            got["bo"] = ids(queue.poll("bo"))
    got["cy"] = ids(queue.poll("cy"))
    send_gone(queue, "ask", "gone")
    return live, got


def settled(queue: Queue, live: list[str], got: dict[str, list[str]]) -> None:
    """Everybody has each live message exactly once, and nothing is left lying about."""
    live = [*live, queue.send("ask", "the last one")]
    for agent in AGENTS:
        found = got[agent] + ids(queue.poll(agent))
        assert found == live, agent
    queue.expire()
    folder = queue.root / "sessions" / "default"
    assert ids(queue.tail(100)) == live
    lines = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
    side_files = {f"{m['msg_id']}.txt" for m in lines if m["body"].startswith("@file:")}
    assert {path.name for path in (folder / "bodies").iterdir()} == side_files
    assert not (folder / "expire.plan").exists() and not (folder / ".messages.jsonl.new").exists()


def test_expire_takes_the_expired_with_their_side_files_and_moves_every_cursor(queue: Queue) -> None:
    live, got = fill(queue)
    queue.poll("ann", ["status"])
    got["ann"] = live
    assert (queue.expire(), queue.expire()) == (7, 0)
    settled(queue, live, got)


def test_expire_keeps_a_last_line_without_its_newline_and_a_session_that_is_not_there(
    queue: Queue, session_path: Path
) -> None:
    assert queue.expire() == 0 and not queue.root.exists()
    send_gone(queue, "ask", "gone")
    write(session_path, b'{"half')
    assert queue.expire() == 1
    assert (session_path / "messages.jsonl").read_bytes() == b'{"half'
    write(session_path, b'": 1}\n')
    queue.send("ask", "next")
    assert [m["body"] for m in queue.poll("ann")] == ["next"]


def test_expire_deletes_no_side_file_that_a_message_still_needs(queue: Queue, session_path: Path) -> None:
    msg_id = queue.send("ask", "x" * 5000)
    write(session_path, to_line({**GOOD, "msg_id": msg_id, "body": f"@file:{msg_id}.txt", "ttl_s": 0}))
    write(session_path, to_line({**GOOD, "msg_id": "m2", "body": f"@file:{msg_id}.txt", "ttl_s": 0}))
    assert queue.expire() == 2
    (found,) = queue.poll("ann")
    assert found["_body_source"] == "side-file"


def test_a_reader_that_has_the_old_file_open_reads_it_to_its_end(queue: Queue, session_path: Path) -> None:
    fill(queue)
    with (session_path / "messages.jsonl").open("rb") as old:
        before = old.read(10)
        queue.expire()
        assert (before + old.read()).count(b"\n") == 13
        # A writer that knows nothing of the lock and has the old file open writes into nowhere: FQ-13 says so.
        assert os.fstat(old.fileno()).st_nlink == 0


def test_what_a_foreign_writer_adds_before_the_new_file_is_in_place_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "q" / "sessions" / "default"

    def step(name: str) -> None:
        if name == "planned":
            write(folder, to_line({**GOOD, "msg_id": "foreign"}), b'{"tail')

    queue = Queue(tmp_path / "q", fsync=False, step=step)
    live, _ = fill(queue)
    assert queue.expire() == 7
    assert ids(queue.poll("ann")) == [*live, "foreign"]
    assert (folder / "messages.jsonl").read_bytes().endswith(b'{"tail')


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("step", STEPS)
def test_an_expire_killed_anywhere_loses_nothing_and_repeats_nothing(
    queue: Queue, step: str, then: str
) -> None:
    live, got = fill(queue)
    killed(queue.root, "expire", step)
    if then == "poll":
        got["ann"] = ids(queue.poll("ann"))
    elif then == "send small":
        live.append(queue.send("ask", "next"))
    else:
        queue.expire()
    settled(queue, live, got)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("planned", "plan_dropped"), ("replaced", "half_a_cursor"), ("replaced", "cursor_moved")),
        *(
            ("cursor_moved", "cursor_moved"),
            ("cursor_moved", "side_files_removed"),
            ("replaced", "plan_removed"),
        ),
    ],
)
@pytest.mark.parametrize("then", NEXT)
def test_who_is_killed_while_finishing_a_killed_expire_leaves_the_same(
    queue: Queue, first: str, second: str, then: str
) -> None:
    live, got = fill(queue)
    killed(queue.root, "expire", first)
    assert killed(queue.root, then, second) == ""
    settled(queue, live, got)


def test_an_expire_that_another_one_finished_is_in_the_audit_once(queue: Queue) -> None:
    fill(queue)
    killed(queue.root, "expire", "replaced")
    queue.poll("ann")
    lines = [json.loads(line) for line in queue.audit_path.read_text().splitlines()]
    assert [(m["removed"], m["finished_for_another"]) for m in lines if m["op"] == "expire"] == [(7, True)]


@pytest.mark.parametrize(
    "plan",
    [
        *(b"", b"[]", b"{}", b"\xff", b'{"cursors":[],"side_files":[],"removed":1}', b"[" * 100_000),
        b'{"cursors":{"../x":1},"side_files":[],"removed":1}',
        b'{"cursors":{"ann":-1},"side_files":[],"removed":1}',
        b'{"cursors":{},"side_files":["../messages.jsonl"],"removed":1}',
    ],
)
def test_a_forged_plan_is_a_clear_error_and_touches_nothing(
    queue: Queue, session_path: Path, plan: bytes
) -> None:
    live, _ = fill(queue)
    (session_path / "expire.plan").write_bytes(plan)
    before = (session_path / "messages.jsonl").read_bytes()
    for call in (lambda: queue.poll("ann"), lambda: queue.send("ask", "x"), queue.expire):
        with pytest.raises(QueueError, match="is not a valid plan of an expire"):
            call()
    assert (session_path / "messages.jsonl").read_bytes() == before
    assert ids(queue.tail(100)) == live
    (session_path / "expire.plan").unlink()
    assert ids(queue.poll("ann")) == live
