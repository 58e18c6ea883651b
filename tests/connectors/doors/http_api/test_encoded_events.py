"""The events of streams: encoded once for all readers, and with their bytes reserved before they are built."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from connectors.doors.http_api.routes import mailbox_stream
from connectors.doors.http_api.routes.mailbox_stream import EncodedMessages, mailbox_events
from connectors.hub.live.settled_feed import SettledFeed, SettledRecord
from connectors.hub.services.settled_stream import EventWriter, Follower, Wanted, server_events
from schemas.streams.mailboxes.mailbox_bodies import MailboxLease
from schemas.streams.mailboxes.message import verified_message
from schemas.wire.record import JSON_CONTENT, Position
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub

pytestmark = pytest.mark.requirement("LM-22")

BY = {"door": "http", "principal": "bo"}
MAILBOX = ("default", "ann")
LONG = 100_000


def hub_with(*sizes: int) -> FoldedHub:
    """A hub whose mailbox of ann has messages m0, m1, … with bodies of these sizes."""
    hub = FoldedHub()
    for number, size in enumerate(sizes):
        body = json.dumps("x" * (size - 2))
        hub.now_us += 1
        hub.add(verified_message(f"m{number}", "bo", "ann", "note", body, JSON_CONTENT).record(**BY))
    return hub


def encoding_of(hub: FoldedHub, monkeypatch: pytest.MonkeyPatch) -> tuple[EncodedMessages, Counter[str]]:
    """The messages of a hub, and how often each is encoded."""
    count: Counter[str] = Counter()
    encode: Callable[..., Any] = mailbox_stream.message_as_json

    def counted(found: Any, row: Any) -> Any:
        count[row.message_id] += 1
        return encode(found, row)

    monkeypatch.setattr(mailbox_stream, "message_as_json", counted)
    given: Any = hub
    return EncodedMessages(given), count


def read(encoded: EncodedMessages, chunks: int) -> tuple[list[list[str]], list[int]]:
    """The ids of the messages in each of so many chunks for a new reader, and the sizes that were reserved."""
    reserved: list[int] = []

    async def reserve(size: int) -> None:
        reserved.append(size)

    async def taken() -> list[bytes]:
        found: list[bytes] = []
        async for chunk in mailbox_events(encoded, [MAILBOX], None, lambda: len(found) < chunks, reserve):
            found.append(chunk)
        return found

    found = asyncio.run(asyncio.wait_for(taken(), 10))
    return [re.findall(r'"id":"(m\d+)"', chunk.decode()) for chunk in found], reserved


def test_a_message_is_encoded_once_for_all_readers_and_anew_when_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = hub_with(100, LONG, 100)
    encoded, count = encoding_of(hub, monkeypatch)
    for _ in range(3):
        assert read(encoded, 2)[0] == [["m0", "m1"], ["m2"]]
    assert count == {"m0": 1, "m1": 1, "m2": 1}
    hub.add(MailboxLease(realm=MAILBOX[0], to=MAILBOX[1], request_id="r", limit=1).record(**BY))
    for _ in range(2):
        assert read(encoded, 2)[0] == [["m0", "m1"], ["m2"]]
    assert count == {"m0": 2, "m1": 1, "m2": 1}


def test_the_bytes_of_a_message_are_reserved_before_it_is_encoded_and_for_each_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded, _ = encoding_of(hub_with(LONG, LONG), monkeypatch)
    for _ in range(2):
        assert all(LONG <= size < LONG + 1000 for size in read(encoded, 2)[1])
        assert len(read(encoded, 2)[1]) == 2

    async def refuse(_: int) -> None:
        raise MemoryError

    async def first() -> bytes:
        return await anext(mailbox_events(fresh, [MAILBOX], None, lambda: True, refuse))

    fresh, count = encoding_of(hub_with(LONG), monkeypatch)
    with pytest.raises(MemoryError):
        asyncio.run(first())
    assert not count


def test_the_encoded_messages_that_are_kept_have_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_stream, "_ENCODED_BYTES", 3 * LONG)
    encoded, count = encoding_of(hub_with(*[LONG] * 5), monkeypatch)
    for _ in range(2):
        assert read(encoded, 5)[0] == [[f"m{number}"] for number in range(5)]
    assert count == {f"m{number}": 2 for number in range(5)}


def records(*sizes: int) -> list[SettledRecord]:
    """Settled records of jobs whose values have these sizes."""
    about = ("job/0a1b2c3d", "job.event", "c", "mqtt/bridge", "accepted", None, None, False, None, None, 0)
    return [
        SettledRecord(Position(0, number), *about, b'{"a":"' + b"x" * (size - 8) + b'"}')
        for number, size in enumerate(sizes)
    ]


def test_the_bytes_of_settled_records_are_reserved_before_their_events_are_built() -> None:
    feed, reserved = SettledFeed(), list[int]()

    async def reserve(size: int) -> None:
        reserved.append(size)

    async def chunks() -> list[bytes]:
        writer, follower = EventWriter("boot", lambda _: None), Follower(feed, lambda: True)
        stream = server_events(writer, follower, Wanted(), None, lambda: {"rows": {}}, reserve)
        found = [await anext(stream)]
        feed.extend(records(10_000, 10_000, LONG, LONG))
        found += [await anext(stream) for _ in range(3)]
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    found = asyncio.run(chunks())
    assert [chunk.count(b"event: settled") for chunk in found] == [0, 2, 1, 1]
    assert reserved[1:] == [20_000, LONG, LONG]
