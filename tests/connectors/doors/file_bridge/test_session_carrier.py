"""One session's carrier, stopped and overtaken at the points where it could lose or repeat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.doors.file_bridge.records import is_to_everybody, may_be_of, may_be_to_everybody
from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from tests.connectors.doors.file_bridge.carriers import Log, carrier, killed
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.queue import Queue
from trunkline_agent.queue.message_record import parse_line, stamp, to_line


def _moved(record: dict[str, object]) -> bytes:
    """The same message as somebody else may write it."""
    line = json.dumps(dict(reversed(record.items()))).replace("m-1", "\\u006d-1")
    return line.encode()


@pytest.mark.requirement("FQ-15")
def test_what_was_appended_and_not_noted_is_appended_again_under_the_same_ids(tmp_path: Path) -> None:
    queue, log = Queue(tmp_path), Log(killed)
    ids = [queue.send("ask", str(number), to="bo", sender="ann") for number in range(3)]
    with pytest.raises(BackboneUnreachable):
        carrier(tmp_path, log.append).carry_some([])
    log.then = lambda: None
    assert carrier(tmp_path, log.append).carry_some([]).lines == 3
    assert log.ids == [*ids, *ids]
    assert carrier(tmp_path, log.append).carry_some([]).lines == 0


@pytest.mark.requirement("FQ-15")
def test_an_expire_between_append_and_cursor_costs_no_line_and_repeats_none(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    stays: list[str] = []

    def send(number: int) -> None:
        stays.append(queue.send("ask", "stays", to="bo", sender="ann"))
        send_gone(queue, "ask", "goes", to="bo", sender="ann")
        if number % 2:
            stays.append(queue.send("ask", "stays", to="bo", sender="ann"))

    def overtake() -> None:
        send(1)
        assert queue.expire() > 0

    log = Log(overtake)
    for turn in range(5):
        send(turn)
        carrier(tmp_path, log.append).carry_some([])
    log.then = lambda: None
    carrier(tmp_path, log.append).carry_some([])
    assert [one for one in log.ids if one in set(stays)] == stays


@pytest.mark.requirement("FQ-15")
def test_a_file_that_is_deleted_and_made_again_meanwhile_is_carried_from_its_beginning(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    messages = tmp_path / "sessions" / "default" / "messages.jsonl"
    ids = [queue.send("ask", "one", to="bo", sender="ann")]

    def make_anew() -> None:
        messages.unlink()
        ids.append(queue.send("ask", "two, which is longer than what was there", to="bo", sender="ann"))

    log = Log(make_anew)
    carrier(tmp_path, log.append).carry_some([])
    log.then = lambda: None
    carrier(tmp_path, log.append).carry_some([])
    assert log.ids == ids


_LINE = {"msg_id": "m-1", "ts": stamp(), "from": "ann", "to": "bo", "topic": "ask", "body": '{"to":null}'}


@pytest.mark.parametrize("to", [None, "all", "broadcast", "allan", "broadcaster", "bo", "a.b-c_d"])
@pytest.mark.parametrize(
    "write",
    [to_line, lambda record: json.dumps(record).encode(), _moved],
    ids=["as_we_write", "spaced", "moved"],
)
def test_what_is_told_apart_without_decoding_is_what_decoding_says(
    to: str | None, write: Callable[[dict[str, object]], bytes]
) -> None:
    line = write({**_LINE, "to": to}).removesuffix(b"\n")
    message = parse_line(line)
    assert message is not None
    assert may_be_to_everybody(line) or not is_to_everybody(message)
    assert may_be_of(line, {"m-1"})
    if write is to_line:
        assert may_be_to_everybody(line) == is_to_everybody(message)
        assert not may_be_of(line, {"m-2"})
