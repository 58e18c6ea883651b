"""The queue against a small pure model: whatever is done in whatever order (FQ-04 to FQ-09)."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.connectors.agent_sdk.agent_queue.expired_messages import GONE_S
from tests.connectors.agent_sdk.agent_queue.test_queue_hostile_lines import GOOD, WRONG_LINES, to_line, write
from trunkline_agent.queue import TOPICS, Queue, QueueDisabledError

AGENTS = ("ann", "bo", "cy")
agents = st.sampled_from(AGENTS)
topics = st.sampled_from(sorted(TOPICS)[:3])
JUNK: dict[str, Any] = {}


class QueueMachine(RuleBasedStateMachine):
    """`lines` is what the file holds; `unfinished` is a last line without its newline, and what it will be.
    `orphans` are side-files that no line names, and whether they are old.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.session = self.folder / "q" / "sessions" / "default"
        self.lines: list[dict[str, Any]] = []
        self.unfinished: dict[str, Any] | None = None
        self.orphans: dict[str, bool] = {}
        self.cursors: dict[str, int] = {}
        self.count = 0
        self.disabled = False

    @initialize()
    def start(self) -> None:
        self.restart()

    @rule()
    def restart(self) -> None:
        self.queue = Queue(self.folder / "q", fsync=False, body_threshold=10)

    def line_ends(self) -> None:
        if self.unfinished is not None:
            self.lines.append(self.unfinished)
            self.unfinished = None

    @rule(topic=topics, to=st.sampled_from([None, "all", *AGENTS]), ttl=st.sampled_from([None, GONE_S, 9999]))
    def send(self, topic: str, to: str | None, ttl: float | None) -> None:
        body = "@file:x.txt" * (self.count % 3)
        if self.disabled:
            with pytest.raises(QueueDisabledError):
                self.queue.send(topic, body, to, ttl)
            return
        self.count += 1
        msg_id = self.queue.send(topic, body, to, ttl, sender="ann")
        time.sleep(3 * GONE_S if ttl == GONE_S else 0)
        self.line_ends()
        self.lines.append(
            {"msg_id": msg_id, "topic": topic, "body": body, "to": to, "ttl_s": ttl, "side": len(body) > 10}
        )

    @rule(line=st.sampled_from([*WRONG_LINES, None]))
    def foreign_line(self, line: bytes | None) -> None:
        self.count += 1
        message = {**GOOD, "msg_id": f"f{self.count}"}
        write(self.session, (to_line(message).strip() if line is None else line) + b"\n")
        # An earlier line without a newline is now one line together with this one.
        merged = self.unfinished is not None
        self.unfinished = None
        self.lines.append(JUNK if merged or line is not None else message)

    @precondition(lambda self: self.unfinished is None)
    @rule(cut=st.integers(0, 400))
    def sender_dies_in_the_middle_of_its_write(self, cut: int) -> None:
        self.count += 1
        message = {**GOOD, "msg_id": f"d{self.count}", "body": "é" * 10, "ttl_s": 9e9}
        line = to_line(message)[:-1]
        kept = line[: 1 + cut % len(line)]
        write(self.session, kept)
        self.unfinished = message if kept == line else JUNK

    @precondition(lambda self: (self.session / "bodies").is_dir())
    @rule(is_old=st.booleans())
    def sender_dies_before_its_line(self, is_old: bool) -> None:
        path = self.session / "bodies" / f"o{len(self.orphans)}-{self.count}.txt"
        path.write_text("nobody names it")
        if is_old:
            os.utime(path, (0, 0))
        self.orphans[path.name] = is_old

    def wanted(self, agent: str, filter_topics: list[str] | None) -> list[str]:
        return [
            line["msg_id"]
            for line in self.lines[self.cursors.get(agent, 0) :]
            if line is not JUNK
            and line["to"] in (None, "all", agent)
            and line["ttl_s"] != GONE_S
            and (filter_topics is None or line["topic"] in filter_topics)
        ]

    @rule(agent=agents, filter_topics=st.none() | st.lists(topics, max_size=2))
    def poll(self, agent: str, filter_topics: list[str] | None) -> None:
        found = [message["msg_id"] for message in self.queue.poll(agent, filter_topics)]
        if self.disabled:
            assert found == []
            return
        assert found == self.wanted(agent, filter_topics)
        self.cursors[agent] = len(self.lines)

    @rule(n=st.integers(0, 6), expired=st.booleans())
    def tail(self, n: int, expired: bool) -> None:
        seen = [line for line in self.lines if line is not JUNK and (expired or line["ttl_s"] != GONE_S)]
        found = self.queue.tail(n, expired)
        assert [m["msg_id"] for m in found] == [
            line["msg_id"] for line in seen[len(seen) - min(n, len(seen)) :]
        ]
        assert not any("_body_error" in message for message in found)

    @rule()
    def expire(self) -> None:
        goes = [line.get("ttl_s") == GONE_S for line in self.lines]
        if self.disabled:
            assert self.queue.expire() == 0
            return
        assert self.queue.expire() == sum(goes)
        self.cursors = {agent: at - sum(goes[:at]) for agent, at in self.cursors.items()}
        self.lines = [line for line, gone in zip(self.lines, goes, strict=True) if not gone]
        if (self.session / "messages.jsonl").exists():
            self.orphans = {name: is_old for name, is_old in self.orphans.items() if not is_old}

    @rule(on=st.booleans())
    def switch(self, on: bool) -> None:
        self.disabled = on
        os.environ["TRUNKLINE_QUEUE_DISABLED"] = "1" if on else "0"

    @invariant()
    def counts(self) -> None:
        status = self.queue.status()
        messages = [line for line in self.lines if line is not JUNK]
        assert status["messages"] == len(messages)
        assert status["unparseable"] == len(self.lines) - len(messages)
        assert status["expired"] == sum(line["ttl_s"] == GONE_S for line in messages)
        kept = [f"{line['msg_id']}.txt" for line in messages if line.get("side")]
        assert sorted(path.name for path in self.session.glob("bodies/*")) == sorted([*kept, *self.orphans])

    def teardown(self) -> None:
        os.environ.pop("TRUNKLINE_QUEUE_DISABLED", None)
        shutil.rmtree(self.folder)


@pytest.mark.long
@pytest.mark.requirement("FQ-04")
@pytest.mark.requirement("FQ-05")
@pytest.mark.requirement("FQ-08")
@pytest.mark.requirement("FQ-09")
def test_the_queue_does_what_the_model_says() -> None:
    run_state_machine_as_test(
        QueueMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
