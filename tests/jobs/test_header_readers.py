"""A fuzzer: raw bytes of headers, as no client of ours sends them, read by Spark, librdkafka and kafka-python.

Hypothesis makes the same cases each time; they travel through one Kafka, and all readers are asked once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from connectors.log.kafka_libraries import records_between
from connectors.log.topic_consumer import LogTail
from jobs.settling.fold_run import SEPARATOR, record_columns, records_of
from schemas.fold.entries import Entries
from schemas.log_access.kafka_clients import spark_security
from schemas.settings.settings import Settings
from schemas.streams.fold import settle
from schemas.wire.record import STANDARD_HEADERS, Record
from tests.connectors.log.test_live_tail import polls_until
from tests.fuzz.fuzzing import mutated
from tests.jobs.topic_load import event
from tests.raw_records import Raw, any_name, append_raw, raw
from tests.schemas.job_records import KEYRING

CASES = 400
Place = tuple[int, int]
Header = tuple[bytes, bytes | None]
GOOD = raw(event("0a1b2c3d", 1))
HEADERS: list[Header] = [(name.encode(), value) for name, value in GOOD.headers]
# Clients in C end a name at its first NUL.
CUT_NAMES = st.tuples(st.sampled_from([name for name, _ in HEADERS]), st.binary(max_size=3)).map(b"\0".join)
NAMES = CUT_NAMES | mutated(*(name for name, _ in HEADERS), b"ce_bodysize", b"traceparent")
VALUES = (
    st.none() | st.sampled_from((SEPARATOR, b"", b"1.0")) | mutated(*(value or b"" for _, value in HEADERS))
)
EDITS = st.lists(
    st.tuples(st.sampled_from(("name", "value", "put", "drop", "double")), st.integers(0, 6), NAMES, VALUES),
    max_size=3,
)


def edited(edits: Iterable[tuple[str, int, bytes, bytes | None]]) -> list[Header]:
    """The usual headers with a few changes."""
    found = list(HEADERS)
    for how, number, name, value in edits:
        at = number % max(1, len(found))
        if how == "put" or not found:
            found.insert(at, (name, value))
        elif how == "drop":
            del found[at]
        elif how == "double":
            found.append((found[at][0], value))
        else:
            found[at] = (name, found[at][1]) if how == "name" else (found[at][0], value)
    return found


def cases() -> list[list[Header]]:
    """The same ones each time."""
    found: list[list[Header]] = [HEADERS]

    @hypothesis_settings(max_examples=CASES, derandomize=True, database=None, deadline=None)
    @given(EDITS)
    def note(edits: Any) -> None:
        found.append(edited(edits))

    note()
    return found


def as_raw(headers: list[Header]) -> Raw:
    """The good event under these headers. The producer that sends null takes names as text alone."""
    has_null = any(value is None for _, value in headers)
    return GOOD._replace(
        headers=[
            (name.decode("utf-8", "replace") if has_null else any_name(name), value) for name, value in headers
        ]
    )


def by_spark(spark: SparkSession, settings: Settings) -> dict[Place, Record]:
    """As the settling job has them."""
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", settings.kafka.bootstrap_servers)
        .options(**spark_security(settings.kafka))
        .option("subscribe", settings.kafka.topic)
        .option("includeHeaders", "true")
        .load()
    )
    found = [record for batch in record_columns(records).toArrow().to_batches() for record in records_of(batch)]
    return {(record.partition, record.offset): record for record in found}


def said_of(record: Record) -> tuple[Any, ...]:
    """Settle a record as the first of its stream; return verdict, reason, detail and envelope."""
    settled = settle(record, Entries(), KEYRING, Entries())
    return settled.verdict, settled.reason, settled.why, settled.envelope


def test_all_readers_of_the_log_bring_the_fold_to_the_same_verdict_whatever_bytes_a_headers_name_has(
    spark, backbone_settings
):
    written = append_raw(backbone_settings, [as_raw(headers) for headers in cases()])
    with LogTail(backbone_settings.kafka, {}) as tail:
        polls = polls_until(tail, lambda found: len(found) >= len(written) + 5)  # the first ones, too
    live = {(record.partition, record.offset): record for batch in polls for record in batch}
    settling = by_spark(spark, backbone_settings)
    slow = records_between(backbone_settings.kafka, written[0].partition, written[0].offset, written[-1].offset)
    answers: Counter[str] = Counter()
    for record in written:
        place = (record.partition, record.offset)
        said = said_of(settling[place])
        assert said_of(live[place]) == said == said_of(slow[record.offset]), (place, record)
        answers[said[2] or said[0]] += 1
        if record.header_names == STANDARD_HEADERS:
            names_and_values = (record.header_names, record.header_values)
            for found in (settling[place], live[place], slow[record.offset]):
                assert (found.header_names, found.header_values) == names_and_values
    print(answers)
    wanted = {"a header's name is not UTF-8", "a header twice", "no header ce_id", "ce_specversion is not 1.0"}
    assert wanted <= answers.keys(), answers
