"""Records that must not cost anybody anything: each poison is one row with its reason."""

from __future__ import annotations

import time

import pytest

from schemas.fold.entries import Entries
from schemas.streams.control.record_macs import MAC_MODELS
from schemas.streams.fold import RECORD_TYPES, settle
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import ledger_row, record_of_row
from schemas.wire.record import STANDARD_HEADERS, VALUE_LIMIT_BYTES, Record
from tests.schemas.job_records import KEYRING, make_record, registration, signed, written
from tests.schemas.stream_records import GOOD as GOOD_BODIES
from tests.schemas.stream_records import known_stream

GOOD = written(signed())
HEADERS = make_record(GOOD)
# Poison of the others has no valid MAC, which is checked first.
CHECKED_TYPES = [record_type for record_type in RECORD_TYPES if record_type not in MAC_MODELS]
TWICE = (*STANDARD_HEADERS[:-1], "ce_id")

POISON = {
    "JSON nested 5,000 deep": make_record(b"[" * 5000 + b"]" * 5000),
    "an object nested 5,000 deep": make_record(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "JSON nested 5,000 deep and never closed": make_record(b"[" * 5000),
    "an event with data 64 deep": make_record(
        GOOD.replace(b'"data":{', b'"data":{"x":' + b"[" * 63 + b"]" * 63 + b",")
    ),
    "invalid UTF-8": make_record(GOOD.replace(b"3/10", b"\xff\xfe")),
    "overlong UTF-8": make_record(GOOD.replace(b"3/10", b"\xc0\xaf")),
    "an encoded surrogate": make_record(GOOD.replace(b"3/10", b"\xed\xa0\x80")),
    "an escaped lone surrogate": make_record(GOOD.replace(b"3/10", b"\\udc00")),
    "an integer of 10,000 digits": make_record(GOOD.replace(b'"seq":1', b'"seq":' + b"1" * 10_000)),
    "a negative integer of 10,000 digits": make_record(GOOD.replace(b'"seq":1', b'"seq":-' + b"1" * 10_000)),
    "a number of 10,000 digits and an exponent": make_record(
        GOOD.replace(b'"seq":1', b'"seq":1e' + b"9" * 10_000)
    ),
    "a float of 10,000 digits as seq": make_record(GOOD.replace(b'"seq":1', b'"seq":1.' + b"1" * 10_000)),
    "UTF-16": make_record(GOOD.decode().encode("utf-16")),
    "no headers": Record("t", 0, 0, 0, b"job/ab12cd34", GOOD, (), ()),
    "a header's name of other bytes": Record(
        "t", 0, 0, 0, HEADERS.key, GOOD, (*HEADERS.header_names, "\ufffd"), (*HEADERS.header_values, b"")
    ),
    "a header twice": Record("t", 0, 0, 0, HEADERS.key, GOOD, TWICE, HEADERS.header_values),
    "a header without a value": Record(
        "t", 0, 0, 0, HEADERS.key, GOOD, STANDARD_HEADERS, (b"1.0", None, *HEADERS.header_values[2:])
    ),
    "a source that is no sender": make_record(GOOD, sender="../etc"),
    "an id that is not UTF-8": Record(
        "t", 0, 0, 0, HEADERS.key, GOOD, STANDARD_HEADERS, (b"1.0", b"\xff", *HEADERS.header_values[2:])
    ),
    "an id of a mebibyte": make_record(GOOD, ce_id="x" * 2**20),
    "a subject that is not the key": Record(
        "t", 0, 0, 0, b"job/00000000", GOOD, STANDARD_HEADERS, HEADERS.header_values
    ),
    "a size that is no number": make_record(GOOD, more_headers=[("ce_bodysize", b"1e9")]),
    "null value": make_record(None),
    "null key": make_record(GOOD, key=None),
    "empty value": make_record(b""),
    "key with a path": make_record(GOOD, key=b"job/../../etc"),
    "key with a wildcard": make_record(GOOD, key=b"job/#"),
    "key of ten kibibytes": make_record(GOOD, key=b"job/" + b"a" * 10_000),
    "key that is not ASCII": make_record(GOOD, key="job/äb12cd34".encode()),
    "job id in upper case": make_record(GOOD, key=b"job/AB12CD34"),
}


@pytest.mark.requirement("CM-02")
@pytest.mark.parametrize("record", POISON.values(), ids=POISON)
def test_poison_is_malformed_and_becomes_a_row(record: Record) -> None:
    entries = Entries()
    settle(make_record(written(registration()), "job.registered"), entries, KEYRING, Entries())
    before = dict(entries.stored())
    settled = settle(record, entries, KEYRING, Entries())
    assert (settled.verdict, settled.reason) == ("rejected", "malformed")
    assert entries.stored() == before
    assert ledger_batch([ledger_row(record, settled, KEYRING)]).num_rows == 1


def poisons_of(record_type: str) -> dict[str, Record]:
    """Poison of one record type, under the key of its stream."""
    key, body = GOOD_BODIES[record_type]
    good = written(body)
    other = b"session/other" if not key.startswith(b"session/") else b"principal/other"
    values = {
        "not JSON": good[:-1],
        "nested 5,000 deep": good[:-1] + b',"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
        "a key twice": good[:-1] + b',"schema_version":1}',
        "NaN": good[:-1] + b',"x":NaN}',
        "an escaped lone surrogate": good[:-1] + b',"x":"\\udc00"}',
        "invalid UTF-8": good[:-1] + b',"x":"\xff"}',
        "an integer of 10,000 digits": good[:-1] + b',"x":' + b"9" * 10_000 + b"}",
        "UTF-16": good.decode().encode("utf-16"),
        "an array": b"[" + good + b"]",
        "null": b"null",
        "empty": b"",
        "no version": written({k: v for k, v in body.items() if k != "schema_version"}),
        "a version that is true": written(body | {"schema_version": True}),
        "a version with a point": written(body | {"schema_version": 1.0}),
    }
    records = {name: make_record(value, record_type, key=key) for name, value in values.items()}
    records["no value"] = make_record(None, record_type, key=key)
    records["no headers"] = Record("t", 0, 0, 0, key, good, (), ())
    records["the key of another kind"] = make_record(good, record_type, key=other)
    records["a key with a path"] = make_record(good, record_type, key=key + b"/../x")
    records["a key with a control character"] = make_record(good, record_type, key=key + b"\x1b")
    records["a type of no stream"] = make_record(good, "job.painted", key=key)
    if record_type in ("agent.said", "agent.confirmed"):
        del records["no version"]  # it may be left out
    if record_type not in ("job.event", "control.topology", "agent.said", "agent.confirmed"):
        records["a key that nobody knows"] = make_record(written(body | {"more": 1}), record_type, key=key)
    if record_type == "control.topology":
        del records["a type of no stream"]  # unknown_stream: these streams look at their types themselves
    return records


@pytest.mark.requirement("CM-02")
@pytest.mark.parametrize("record_type", CHECKED_TYPES)
def test_poison_of_every_record_type_is_malformed_and_becomes_a_row(record_type: str) -> None:
    for name, record in poisons_of(record_type).items():
        for entries in (Entries(), known_stream(GOOD_BODIES[record_type][0])):
            before = dict(entries.stored())
            settled = settle(record, entries, KEYRING, Entries())
            assert (settled.verdict, settled.reason) == ("rejected", "malformed"), name
            assert (entries.stored(), settled.changes) == (before, ()), name
            row = ledger_row(record, settled, KEYRING)
            assert ledger_batch([row]).num_rows == 1
            copy = record_of_row(row, KEYRING)
            assert (copy.key, copy.value) == (record.key, record.value), name


@pytest.mark.requirement("CM-02")
@pytest.mark.parametrize("record_type", CHECKED_TYPES)
def test_a_record_over_the_limit_is_too_large_whatever_its_type(record_type: str) -> None:
    key, body = GOOD_BODIES[record_type]
    cut = make_record(written(body), record_type, key=key, more_headers=[("ce_bodysize", b"1048577")])
    assert settle(cut, known_stream(key), KEYRING, Entries()).reason == "too_large"


@pytest.mark.long
@pytest.mark.requirement("CM-02")
@pytest.mark.parametrize(
    "record",
    [
        make_record(b"[" * 1024, more_headers=[("ce_bodysize", b"1048577")]),
        make_record(b"x" * (VALUE_LIMIT_BYTES + 1)),
        Record("t", 0, 0, 0, None, b"x" * (VALUE_LIMIT_BYTES + 1), (), ()),
    ],
    ids=["cut off by its door", "beyond what any door lets in", "beyond it and without headers"],
)
def test_a_body_over_the_limit_is_too_large_before_it_is_parsed(record: Record) -> None:
    assert settle(record, Entries(), KEYRING, Entries()).reason == "too_large"


# Each makes a careless regular expression look at the rest of the text from every character on.
HOSTILE = (
    "a.",
    "eyJaaaaaaaa-",
    "a://b:",
    "bearer ",
    "/",
    "~a-",
    "A_",
    "token ",
    "\\\\a.",
    "-----BEGIN ",
    "sk-a ",
)


@pytest.mark.long
@pytest.mark.parametrize("piece", HOSTILE)
def test_a_hostile_quarter_mebibyte_costs_the_fold_no_more_than_a_moment(piece: str) -> None:
    text = (piece * (2**18 // len(piece)) + " ://=:").replace("\\", "\\\\")
    bodies = (GOOD.replace(b"3/10", text.encode()), b"{" + text.encode())
    began = time.process_time()
    for body in bodies:
        assert settle(make_record(body), Entries(), KEYRING, Entries()).reason == "malformed"
    assert time.process_time() - began < 2  # the first version took ten minutes for a mebibyte
