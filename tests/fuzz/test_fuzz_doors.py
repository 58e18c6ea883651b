"""Input over MQTT and HTTP: topics, receipts, bodies, keys of requests, positions to resume from."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import strategies as st

from connectors.doors.dashboard.event_broadcast import LENGTH_LIMIT, LogPosition, parsed_position
from connectors.doors.mqtt_bridge.bridge_records import Incoming, incoming, receipt_of
from connectors.hub.live.settled_feed import SettledFeed, SettledRecord
from connectors.hub.services.settled_stream import EventWriter
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.identities import IdempotencyKey, request_uuid
from connectors.hub.serving.strict_request import StrictRequest
from connectors.plumbing.mqtt_link.payloads import encode_presence, encode_receipt, read_presence
from schemas.settings.settings import MqttSettings
from tests.connectors.plumbing.gateway_client.test_gateway_client import parsed
from tests.fuzz.fuzzing import awaited, fuzzed, mutated, mutated_json, mutated_text
from tests.schemas.job_records import signed
from trunkline_agent.errors import TrunklineError
from trunkline_agent.mqtt.inbox_receiver import InboxMessage, read_inbox
from trunkline_agent.mqtt.mqtt_client import well_formed_traceparent
from trunkline_agent.wire.ids import parse_stream_key
from trunkline_agent.wire.receipt import AgentReceipt, Receipt, read_receipt
from trunkline_agent.wire.receipt import LogPosition as Position
from trunkline_agent.wire.strict_json import MalformedJsonError, decode
from trunkline_agent.wire.topics import inbox_topic

MQTT = MqttSettings()
EVENT = signed(3)
TOPICS = (f"{MQTT.topic_prefix}/ab12cd34/events", f"{MQTT.agents_prefix}/ann/outbox")


@pytest.mark.long
@pytest.mark.requirement("CM-01")
@fuzzed(
    st.tuples(mutated_text(*TOPICS), mutated_json(EVENT), mutated_text(f"00-{'ab' * 16}-{'cd' * 8}-01")), 120
)
def test_no_topic_leads_a_message_or_its_receipt_anywhere_else(case: Any) -> str:
    """For any topic and payload the record has a good key and headers, and its receipt a topic of its own."""
    topic, payload, trace = case
    trace = well_formed_traceparent(type("Properties", (), {"UserProperty": [("traceparent", trace)]}))
    found: Incoming = incoming(MQTT, topic, payload, trace)
    kind, name = parse_stream_key(found.record.key) or ("", "")
    assert kind in ("job", "agent", "refused")
    assert all(isinstance(value, bytes) for _, value in found.record.headers())
    assert found == incoming(MQTT, topic, payload, trace)
    assert receipt_of(found.record, Position(0, 1))
    if found.receipts_to is None:
        assert (kind, name) == ("refused", "mqtt")
        return "refused"
    assert topic in (f"{MQTT.topic_prefix}/{name}/events", f"{MQTT.agents_prefix}/{name}/outbox")
    assert found.receipts_to in (f"{MQTT.topic_prefix}/{name}/receipts", inbox_topic(MQTT.agents_prefix, name))
    return kind


RECEIPT = {
    "ce_id": "ab" * 32,
    "seq": 3,
    "verdict": "accepted",
    "reason": None,
    "position": {"partition": 0, "offset": 9},
}


@pytest.mark.requirement("JE-19")
@fuzzed(mutated_json({"bridge": "b-1", "active": True}))
def test_a_presence_is_one_by_its_form_or_nothing(case: bytes) -> str:
    """Where the broker is not ours anybody may publish it; who stands by goes on listening."""
    found = read_presence(case)
    if found is None:
        return "nothing"
    assert (type(found.bridge), type(found.active)) == (str, bool)
    assert read_presence(encode_presence(found)) == found
    return "a presence"


EVENTS = b'event: settled\nid: boot-7\ndata: {"a":1}\n\n: a comment\r\ndata: [1,\ndata: 2]\r\n\r\n'


@fuzzed(st.tuples(mutated(EVENTS), st.integers(0, 80)))
def test_a_stream_of_events_is_read_alike_however_it_is_cut(case: Any) -> str:
    """Where its pieces end is the network's; data that is not JSON is an error of ours."""
    whole, place = case

    def read(*pieces: bytes) -> list[Any] | str:
        try:
            return parsed(pieces)
        except TrunklineError:
            return "not JSON"

    found = read(whole)
    assert found == read(whole[:place], whole[place:]) == read(*(bytes([one]) for one in whole))
    if isinstance(found, str):
        return found
    assert all("\n" not in event.name and "\0" not in (event.id or "") for event in found)
    return "events" if found else "nothing"


INBOX = (
    {"from": "ann", "from_verified": True, "message_id": "m-1", "kind": "note", "body": "{}", "thread": None},
    RECEIPT | {"message_id": "m-1", "kind": "receipt"},
)


@pytest.mark.requirement("JE-26")
@fuzzed(mutated_json(*INBOX))
def test_what_comes_on_an_inbox_is_a_message_or_a_receipt_by_its_form_or_nothing(case: bytes) -> str:
    """Where the broker is not ours anybody may publish there; what is none must not hold up what is."""
    found = read_inbox(case)
    if found is None:
        return "nothing"
    if isinstance(found, AgentReceipt):
        assert read_inbox(encode_receipt(found)) == found
        return "a receipt"
    fields = decode(case)[0]
    assert found == InboxMessage(
        *(fields[name] for name in ("message_id", "from", "from_verified", "kind", "body")), fields
    )
    assert {type(one) for one in (found.message_id, found.sender, found.kind, found.body)} == {str}
    return "a message"


@pytest.mark.requirement("JE-17")
@fuzzed(mutated_json(RECEIPT))
def test_a_receipt_is_one_by_its_form_or_nothing(case: bytes) -> str:
    """Anybody may publish on the topic of receipts; what was read is written and read again."""
    found = read_receipt(case)
    if found is None:
        return "nothing"
    assert isinstance(found, Receipt)
    assert read_receipt(encode_receipt(found)) == found
    return "a receipt"


LIMIT = 4096
BODIES = st.tuples(
    st.lists(mutated_json(EVENT), min_size=1, max_size=3),
    mutated(b"17", b"99999999999999999999999", b"\xb217"),
    st.sampled_from((1, 7, 1000)),
)


@pytest.mark.long
@pytest.mark.requirement("CM-02")
@fuzzed(BODIES, examples=80)
def test_a_body_is_read_whole_and_strictly_or_refused_with_a_status(case: Any) -> str:
    """In whatever pieces it comes and whatever length it announces."""
    parts, length, size = case
    body = b"".join(parts[:1] if size == 7 else parts)[: 3 * LIMIT]
    pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]

    async def receive() -> Any:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", length)]}
    try:
        document = awaited(StrictRequest(scope, receive, LIMIT).json())
    except ApiError as error:
        assert error.status_code in (400, 413)
        assert error.reason in ("malformed", "too_large")
        if error.reason == "malformed":
            with pytest.raises(MalformedJsonError):
                decode(body)
        return error.reason
    assert len(body) <= LIMIT
    assert document == decode(body)[0]
    return "read"


def _asking() -> FastAPI:
    app = FastAPI()

    @app.post("/")
    async def asked(key: IdempotencyKey = None) -> str:
        return str(request_uuid("ann", key))

    return app


ASKING = _asking()


async def _status_and_body(headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
    await ASKING(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.requirement("CM-04")
@fuzzed(mutated(b"one-more-time", b"!" * 255, b"x" * 256), examples=50)
def test_a_key_of_a_request_is_visible_ascii_and_names_one_request(case: bytes) -> str:
    """Two keys never name the same request, and what is no key is refused."""
    status, body = awaited(_status_and_body([(b"idempotency-key", case)]))
    if re.fullmatch(rb"[\x21-\x7e]{1,255}", case) is None:
        assert status == 422
        return "refused"
    key = case.decode()
    assert (status, body) == (200, f'"{request_uuid("ann", key)}"'.encode())
    assert request_uuid("ann", key) not in (request_uuid("bo", key), request_uuid("ann", key + "x"))
    return "a key"


FEED = SettledFeed(limit_records=5)
FEED.extend(
    [
        SettledRecord((0, n), "job/x", None, None, None, "accepted", None, None, False, None, None, 0, None)
        for n in range(9)
    ]
)
WRITER = EventWriter("boot", lambda name: None)


@fuzzed(mutated_text("boot-7", "boot-9", "boot-1", "boot-999999999999999999"))
def test_a_place_in_the_events_is_one_that_is_in_memory_or_none(case: str) -> str:
    """A `Last-Event-ID` is text of anybody's."""
    cursor = WRITER.cursor_of(case, FEED)
    if cursor is None:
        return "none"
    assert 4 <= cursor <= FEED.newest
    assert WRITER.event("x", cursor, {}).splitlines()[1] == f"id: boot-{cursor}".encode()
    return "a place"


PLACE = str(LogPosition(3, {0: 5, 1: 0, 2: 10**14}))


@pytest.mark.requirement("AM-11")
@fuzzed(st.one_of(mutated_text(PLACE, "e3:0.0.0", "e4:1.2.3"), st.just("e3:" + "1." * LENGTH_LIMIT + "1")))
def test_a_place_in_the_log_has_one_offset_for_each_partition_or_is_none(case: str) -> str:
    """A reader of the dashboard's events sends the position that it has seen."""
    found = parsed_position(case, 3, 3)
    if found is None:
        return "none"
    assert sorted(found.offsets) == [0, 1, 2]
    assert all(0 <= offset < 10**15 for offset in found.offsets.values())
    again = parsed_position(str(found), 3, 3)
    assert again is not None
    assert again.offsets == found.offsets
    return "a place"
