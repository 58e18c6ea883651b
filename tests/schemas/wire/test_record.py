"""The record in Kafka: headers that the CloudEvents library reads, ids of content, bodies cut off."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime

import msgspec
import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from cloudevents.core.formats.json import JSONFormat
from hypothesis import given
from hypothesis import strategies as st

from schemas.streams.job.job_registry import JOB_EVENT
from schemas.wire.record import (
    STANDARD_HEADERS,
    BadEnvelopeError,
    OutgoingRecord,
    Record,
    oversized,
    read_envelope,
    refused_stream,
)
from trunkline_agent.wire.ids import content_id


def outgoing(value: bytes = b"{}", ce_id: str = "id-1", traceparent: str | None = None) -> OutgoingRecord:
    """A record as a door makes it."""
    return OutgoingRecord(
        "job/ab12cd34", ce_id, "mqtt", "unverified", JOB_EVENT, value, traceparent=traceparent
    )


def as_read(made: OutgoingRecord) -> Record:
    """The same record as a runner reads it back."""
    headers = made.headers()
    names, values = tuple(name for name, _ in headers), tuple(raw for _, raw in headers)
    return Record("t", 0, 0, 0, made.key, made.value, names, values)


def test_the_usual_headers_come_in_the_order_that_the_fold_takes_the_short_way_for() -> None:
    assert as_read(outgoing()).header_names == STANDARD_HEADERS


@given(st.lists(st.text(st.sampled_from("ab\0\ufffd")), min_size=7, max_size=7))
def test_a_headers_name_ends_at_its_first_nul_as_clients_in_c_read_it(tails: list[str]) -> None:
    whole = as_read(outgoing())
    names = tuple(f"{name}\0{tail}" for name, tail in zip(whole.header_names, tails, strict=True))
    assert read_envelope(msgspec.structs.replace(whole, header_names=names)) == read_envelope(whole)
    for odd, why in (("ce_id\0x", "a header twice"), ("x\ufffd\0", "a header's name is not UTF-8")):
        record = msgspec.structs.replace(
            whole, header_names=(*names, odd), header_values=(*whole.header_values, b"")
        )
        with pytest.raises(BadEnvelopeError, match=why):
            read_envelope(record)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50))
def test_the_envelope_is_what_the_door_said(ce_id: str) -> None:
    for made in (outgoing(ce_id=ce_id), outgoing(ce_id=ce_id, traceparent="00-1")):
        envelope = read_envelope(as_read(made))
        assert (envelope.ce_id, envelope.door, envelope.principal) == (ce_id, "mqtt", "unverified")
        assert (envelope.type, envelope.body_bytes) == (JOB_EVENT, None)


def test_the_time_in_the_headers_is_utc_with_z() -> None:
    headers = dict(outgoing().headers(datetime(2026, 11, 21, 10, tzinfo=UTC)))
    assert headers["ce_time"] == b"2026-11-21T10:00:00.000Z"


def test_the_cloudevents_library_reads_our_record() -> None:
    made = outgoing(b'{"a":1}')
    message = KafkaMessage(headers=dict(made.headers()), key=made.key, value=made.value)
    found = from_binary_event(message, JSONFormat())
    assert found.get_id() == "id-1"
    assert found.get_source() == "mqtt/unverified"
    assert found.get_type() == JOB_EVENT
    assert found.get_subject() == "job/ab12cd34"
    assert found.get_specversion() == "1.0"
    assert found.get_data() == {"a": 1}


@pytest.mark.requirement("CM-02")
@pytest.mark.parametrize(("size", "cut"), [(0, False), (2000, False), (2001, True), (9000, True)])
def test_of_a_body_over_the_limit_size_digest_and_the_first_kibibyte_travel(size: int, cut: bool) -> None:
    value = bytes(range(256)) * 40
    made = oversized(outgoing(value[:size]), limit_bytes=2000)
    assert made.value == (value[:1024] if cut else value[:size])
    assert made.body_bytes == (size if cut else None)
    assert made.body_sha256 == (hashlib.sha256(value[:size]).hexdigest() if cut else None)
    assert read_envelope(as_read(made)).body_bytes == made.body_bytes
    assert made.ce_id == "id-1", "the id is the whole body's"


@pytest.mark.requirement("CM-04")
@given(st.lists(st.binary(max_size=8), max_size=4), st.lists(st.binary(max_size=8), max_size=4))
def test_an_id_of_content_is_the_same_for_the_same_parts_and_no_others(a: list[bytes], b: list[bytes]) -> None:
    assert (content_id(*a) == content_id(*b)) == (a == b)


@pytest.mark.requirement("CM-01")
def test_what_a_door_cannot_key_has_a_stream_of_that_door() -> None:
    assert refused_stream("mqtt") == "refused/mqtt"


def test_equal_records_that_are_appended_one_after_the_other_have_different_times() -> None:
    record = OutgoingRecord("job/0a1b2c3d", "id", "http", "operator", "job.event", b"{}")
    times = {dict(record.headers())["ce_time"] for _ in range(100)}
    assert len(times) == 100
    assert all(re.fullmatch(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", one) for one in times)
