"""The environment of the file queue: where it lies, its older names, its kill switch (FQ-09, FQ-11)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from trunkline_agent.queue import DEFAULT_BODY_THRESHOLD, Queue, QueueDisabledError, QueueError
from trunkline_agent.queue.queue_settings import QueueSettings, find_root


@pytest.mark.requirement("FQ-11")
@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"TRUNKLINE_QUEUE_ROOT": "/a", "TRUNKLINE_HOME": "/b", "ZOS_MQ_ROOT": "/c", "ZOS_HOME": "/d"}, "/a"),
        ({"TRUNKLINE_HOME": "/b", "ZOS_MQ_ROOT": "/c", "ZOS_HOME": "/d"}, "/b/queue"),
        ({"ZOS_MQ_ROOT": "/c", "ZOS_HOME": "/d", "XDG_DATA_HOME": "/e"}, "/c"),
        ({"ZOS_HOME": "/d", "XDG_DATA_HOME": "/e"}, "/d/agent-mq"),
        ({"XDG_DATA_HOME": "/e", "HOME": "/f"}, "/e/trunkline/queue"),
        ({"XDG_DATA_HOME": "e", "HOME": "/f"}, "/f/.local/share/trunkline/queue"),
        ({"TRUNKLINE_QUEUE_ROOT": "", "ZOS_HOME": "", "HOME": "/f"}, "/f/.local/share/trunkline/queue"),
    ],
)
def test_the_root_is_the_first_that_is_set(environment: dict[str, str], root: str) -> None:
    assert find_root(environment) == root


@pytest.mark.requirement("FQ-11")
def test_the_newer_name_wins_over_the_older_one_and_both_over_the_default() -> None:
    names = {"SESSION": "session", "AGENT_ID": "agent_id", "BODY_THRESHOLD": "body_threshold"}
    plain = QueueSettings({"HOME": "/f"})
    assert (plain.session, plain.agent_id, plain.body_threshold, plain.fsync) == ("default", None, 3584, True)
    assert DEFAULT_BODY_THRESHOLD == 3584
    older = {f"ZOS_MQ_{name}": "7" for name in names}
    newer = {f"TRUNKLINE_QUEUE_{name}": "8" for name in names}
    for environment, expected in ((older, "7"), ({**older, **newer}, "8")):
        found = QueueSettings({"HOME": "/f", **environment})
        assert [str(getattr(found, name)) for name in names.values()] == [expected] * 3


@pytest.mark.requirement("FQ-11")
def test_session_and_sender_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Queue(tmp_path / "q").send("ask", "x")
    monkeypatch.setenv("ZOS_MQ_SESSION", "other")
    monkeypatch.setenv("TRUNKLINE_QUEUE_AGENT_ID", "ann")
    monkeypatch.setenv("TRUNKLINE_QUEUE_BODY_THRESHOLD", "0")
    queue = Queue(tmp_path / "q")
    queue.send("ask", "x")
    assert [(m["from"], m.get("_body_source")) for m in queue.tail()] == [("ann", "side-file")]
    assert [m["from"] for m in queue.tail(session="default")] == ["anonymous"]


@pytest.mark.requirement("FQ-11")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("TRUNKLINE_QUEUE_BODY_THRESHOLD", text) for text in ("x", "-1", "1.5", "9" * 5000, "٣", "1048577")),
        *(("TRUNKLINE_QUEUE_FSYNC", text) for text in ("yes", "2")),
        ("ZOS_MQ_BODY_THRESHOLD", "many"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(QueueError, match=f"{name} must be"):
        Queue(tmp_path / "q")


@pytest.mark.requirement("FQ-12")
def test_the_public_attributes_say_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    queue = Queue("q", body_threshold=5)
    monkeypatch.chdir("/")
    assert (queue.root, queue.audit_path) == (tmp_path / "q", tmp_path / "q" / "audit.jsonl")
    assert queue.body_threshold == 5
    assert Queue().root == tmp_path / "data" / "trunkline" / "queue"
    with pytest.raises(QueueError, match="body_threshold must be"):
        Queue("q", body_threshold=True)


@pytest.mark.requirement("FQ-09")
@pytest.mark.parametrize("name", ["TRUNKLINE_QUEUE_DISABLED", "ZOS_MQ_DISABLED"])
def test_the_kill_switch_stops_what_changes_anything_and_nothing_else(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    send_gone(queue, "ask", "gone")
    queue.send("ask", "kept")
    before = {path: path.read_bytes() for path in queue.root.rglob("*") if path.is_file()}
    monkeypatch.setenv(name, "1")
    with pytest.raises(QueueDisabledError):
        queue.send("ask", "x")
    assert (queue.poll("ann"), queue.expire()) == ([], 0)
    assert [m["body"] for m in queue.tail()] == ["kept"]
    assert queue.status()["messages"] == 2
    assert {path: path.read_bytes() for path in queue.root.rglob("*") if path.is_file()} == before
    # Already open queues feel it, too, both ways.
    monkeypatch.setenv(name, "0")
    assert ([m["body"] for m in queue.poll("ann")], queue.expire()) == (["kept"], 1)


@pytest.mark.requirement("FQ-09")
def test_the_newer_kill_switch_decides_and_what_does_not_mean_no_means_yes(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOS_MQ_DISABLED", "1")
    for word, stops in (("0", False), ("off", False), ("No", False), ("1", True), ("true", True), ("x", True)):
        monkeypatch.setenv("TRUNKLINE_QUEUE_DISABLED", word)
        if stops:
            with pytest.raises(QueueDisabledError):
                queue.send("ask", "x")
        else:
            queue.send("ask", "x")
    assert "TRUNKLINE_QUEUE_DISABLED" in os.environ
