"""The log made again from the ledger: the same records at the same offsets with the same times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kafka import TopicPartition

from connectors.hub.live.live_view import LiveView
from connectors.log.kafka_topic import ensure_topic
from connectors.tools.audit.verification import verify
from connectors.tools.log_rebuild.log_rebuild import WRITTEN, LogRebuild, RebuildPlan, Rebuilt
from connectors.tools.log_rebuild.rebuilt_topic import delete_topic, end_rebuilding, topic_state
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import LogLostError, LogUnfinishedError, admin_client, check_topic
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import TOPOLOGY_STREAM
from schemas.streams.job.job_registry import JOB_EVENT
from schemas.wire.record import MAC_HEADERS, STANDARD_HEADERS, OutgoingRecord, Record, partition_for
from tests.broker_processes import with_kafka
from tests.faults.backbone_states import differences, ledger_in_order, state_of_live_view, state_of_refold
from tests.random_log import RandomLog
from tests.raw_records import Raw, any_name, append_raw, raw
from tests.settled_topic import build_views, records_in_topic, settle_topic, settled_rows
from trunkline_agent.errors import NotFound, Refused
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical

NOT_IN_THE_LEDGER = [STANDARD_HEADERS.index(name) for name in ("ce_time", "content-type")]
ODD_HEADERS: list[list[tuple[str, bytes | None]]] = [
    [],
    [("ce_id", None), ("", b""), ("größe", b"\x00\xff"), ("ce_id", b"again")],
    [(any_name(b"caf\xe9 \xff"), b"not UTF-8")],
]


def rebuild(settings: Settings, keyring: Keyring) -> tuple[RebuildPlan, Rebuilt]:
    """Plan and run."""
    work = LogRebuild(settings, keyring, lambda step, done, total: None)
    plan = work.plan()
    return plan, work.run(plan)


def known(record: Record) -> object:
    """All of a record but the two headers that the ledger does not keep of one of ours."""
    values = list(record.header_values)
    if record.header_names in (STANDARD_HEADERS, MAC_HEADERS):
        for at in NOT_IN_THE_LEDGER:
            values[at] = None
    return record.partition, record.offset, record.logged_at_us, record.key, record.value, values


def written_log(settings: Settings, keyring: Keyring, count: int = 60) -> dict[int, list[Record]]:
    """The records of a topic with a random log, by partition."""
    append_raw(settings, RandomLog(3, keyring).records(count))
    return records_in_topic(settings)


def made_anew(settings: Settings, folder: Path, epoch: int = 1) -> None:
    """Delete the topic and make it as a first start does, which knows of no ledger."""
    delete_topic(settings.kafka)
    elsewhere = {"data_dir": folder / "of another start", "master_key_file": settings.key_file}
    ensure_topic(with_kafka(settings, epoch=epoch).model_copy(update=elsewhere))


@pytest.mark.requirement("OP-30")
def test_a_lost_log_is_rebuilt_with_every_record_at_its_offset_and_folds_to_the_same_ledger(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    append_raw(backbone_settings, [Raw(b"job/0a1b2c3d", b"{}", headers) for headers in ODD_HEADERS])
    append_raw(backbone_settings, [Raw(None, b"\x00", []), Raw(b"", None, []), Raw(b"\xff/", b"", [])])
    before = written_log(backbone_settings, keyring, 1500)
    settle_topic(backbone_settings, keyring)
    build_views(backbone_settings)
    delete_topic(backbone_settings.kafka)
    plan, done = rebuild(backbone_settings, keyring)
    assert (plan.log, plan.lost, done.written) == ({}, {}, sum(map(len, before.values())))
    check_topic(backbone_settings)
    after = records_in_topic(backbone_settings)
    for partition, records in before.items():
        assert [known(one) for one in after[partition]] == [known(one) for one in records]
        assert [one.header_names for one in after[partition]] == [one.header_names for one in records]
        # Sealing is deterministic: with equal rows the leaves are equal, too.
        assert settled_rows(after[partition], keyring) == settled_rows(records, keyring)
    assert verify(backbone_settings).findings == ()
    again, done = rebuild(backbone_settings, keyring)
    assert (again.missing, done.written) == ({}, 0)
    refolded = state_of_refold(ledger_in_order(backbone_settings), keyring)
    view = LiveView(backbone_settings, keyring)
    try:
        view.open()
        assert differences(state_of_live_view(view, refolded["entries"]), refolded) == []
    finally:
        view.close()


@pytest.mark.requirement("OP-31")
def test_a_topic_that_the_ledger_has_records_of_is_not_made_anew_and_the_refusal_names_the_rebuild(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    written_log(backbone_settings, keyring)
    settle_topic(backbone_settings, keyring)
    delete_topic(backbone_settings.kafka)
    for call in (ensure_topic, check_topic):
        with pytest.raises(LogLostError, match=r"the ledger at .* './trunkline log rebuild'"):
            call(backbone_settings)


@pytest.mark.requirement("OP-31")
def test_a_live_view_on_a_log_that_is_shorter_than_the_tables_names_the_rebuild(
    backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    written_log(backbone_settings, keyring)
    settle_topic(backbone_settings, keyring)
    build_views(backbone_settings)
    made_anew(backbone_settings, tmp_path)
    view = LiveView(backbone_settings, keyring)
    with pytest.raises(Exception, match=r"'\./trunkline log rebuild' makes the log again"):
        view.open()
    view.close()


@pytest.mark.requirement("OP-32")
def test_an_interrupted_rebuild_goes_on_and_until_then_no_program_starts_on_the_topic(
    backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    before = written_log(backbone_settings, keyring)
    settle_topic(backbone_settings, keyring)
    made_anew(backbone_settings, tmp_path)

    def interrupt(step: str, done: int, total: int) -> None:
        assert step == WRITTEN
        raise KeyboardInterrupt

    work = LogRebuild(backbone_settings, keyring, interrupt)
    plan = work.plan()
    assert plan.replaces_topology
    with pytest.raises(KeyboardInterrupt):
        work.run(plan)
    for call in (ensure_topic, check_topic):
        with pytest.raises(LogUnfinishedError, match="log rebuild' has not finished"):
            call(backbone_settings)
    plan, done = rebuild(backbone_settings, keyring)
    assert not plan.replaces_topology
    assert plan.log == {0: len(before[0]), 1: 0, 2: 0, 3: 0}
    assert done.written == plan.to_write == sum(len(before[n]) for n in (1, 2, 3))
    check_topic(backbone_settings)
    after = records_in_topic(backbone_settings)
    assert {n: list(map(known, found)) for n, found in after.items()} == {
        n: list(map(known, found)) for n, found in before.items()
    }


@pytest.mark.requirement("OP-32")
def test_a_log_that_lost_records_keeps_the_others_and_what_is_newer_than_the_ledger(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    before = written_log(backbone_settings, keyring)
    settle_topic(backbone_settings, keyring)
    delete_topic(backbone_settings.kafka)

    def stop(step: str, done: int, total: int) -> None:
        raise InterruptedError

    work = LogRebuild(backbone_settings, keyring, stop)
    with pytest.raises(InterruptedError):
        work.run(work.plan())
    end_rebuilding(backbone_settings.kafka)
    in_the_first = next(key for n in range(99) if partition_for(key := b"%d" % n, 4) == 0)
    (newer,) = append_raw(backbone_settings, [Raw(in_the_first, b"newer", [])])
    plan, done = rebuild(backbone_settings, keyring)
    assert (plan.log[0], plan.is_rebuilding) == (len(before[0]) + 1, False)
    assert done.written == sum(len(before[n]) for n in (1, 2, 3))
    check_topic(backbone_settings)
    after = records_in_topic(backbone_settings)
    before[0].append(newer)
    assert {n: list(map(known, found)) for n, found in after.items()} == {
        n: list(map(known, found)) for n, found in before.items()
    }


@pytest.mark.requirement("OP-33")
def test_a_topic_with_other_records_than_the_ledger_is_refused_and_stays_as_it_is(
    backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    written_log(backbone_settings, keyring)
    settle_topic(backbone_settings, keyring)
    made_anew(backbone_settings, tmp_path)
    append_raw(backbone_settings, [Raw(b"job/0a1b2c3d", b"acknowledged after the loss", [])])
    found = records_in_topic(backbone_settings)
    with pytest.raises(
        Refused, match=r"at offset 0 of partition \d of topic .* is not the one .* Nothing was changed"
    ):
        rebuild(backbone_settings, keyring)
    assert records_in_topic(backbone_settings) == found


@pytest.mark.requirement("OP-33")
def test_a_new_topic_of_another_epoch_or_without_its_first_records_is_refused_and_stays_as_it_is(
    backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    written_log(backbone_settings, keyring)
    settle_topic(backbone_settings, keyring)
    made_anew(backbone_settings, tmp_path, epoch=2)
    found = records_in_topic(backbone_settings)
    with pytest.raises(Refused, match="is not the one that the ledger has there"):
        rebuild(backbone_settings, keyring)
    assert records_in_topic(backbone_settings) == found
    made_anew(backbone_settings, tmp_path)
    first = TopicPartition(backbone_settings.kafka.topic, partition_for(TOPOLOGY_STREAM.encode(), 4))
    with admin_client(backbone_settings.kafka) as admin:
        admin.delete_records({first: -1})
    with pytest.raises(Refused, match=rf"no longer has its first records, in partition {first.partition} "):
        rebuild(backbone_settings, keyring)
    state = topic_state(backbone_settings.kafka)
    assert state is not None and state.begins[first.partition] == state.ends[first.partition] == 2


@pytest.mark.requirement("OP-33")
def test_a_ledger_that_does_not_have_every_record_once_is_refused_with_the_offsets(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    before = written_log(backbone_settings, keyring)
    number = max(before, key=lambda partition: len(before[partition]))
    lacking = {(number, 1), (number, 2), (number, 4)}
    ledger = settle_topic(backbone_settings, keyring, lambda one: (one.partition, one.offset) not in lacking)
    ledger.plant(settled_rows(before[number], keyring)[:1])
    delete_topic(backbone_settings.kafka)
    with pytest.raises(Refused) as refused:
        rebuild(backbone_settings, keyring)
    for text in (
        f"offsets 1 to 2 are missing in partition {number}",
        f"offset 4 is missing in partition {number}",
        f"offset 0 is there twice in partition {number}",
        "Nothing was changed",
    ):
        assert text in str(refused.value), str(refused.value)
    assert topic_state(backbone_settings.kafka) is None


@pytest.mark.requirement("OP-33")
def test_a_missing_master_key_another_topology_and_a_missing_ledger_are_refused_before_anything_is_written(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    with pytest.raises(NotFound, match="there is no ledger"):
        rebuild(backbone_settings, keyring)
    event = canonical(
        sign_event({"schema_version": 1, "detail": "see /home/me/.ssh/id_rsa", "data": {}}, "a secret")
    )
    append_raw(backbone_settings, [raw(OutgoingRecord("job/0a1b2c3d", "x", "mqtt", "x", JOB_EVENT, event))])
    settle_topic(backbone_settings, keyring)
    delete_topic(backbone_settings.kafka)
    with pytest.raises(Refused, match=r"master keys are missing.*'k[0-9a-f]{8}' \(1 records\)"):
        rebuild(backbone_settings, Keyring({"another": b"k" * 32}, "another"))
    with pytest.raises(Refused, match=r"has partitions and epoch \(4, 1\), the settings say .*epoch=2"):
        rebuild(with_kafka(backbone_settings, epoch=2), keyring)
    with pytest.raises(Refused, match="holds records of topic"):
        rebuild(with_kafka(backbone_settings, topic="another"), keyring)
    assert topic_state(backbone_settings.kafka) is None


@pytest.mark.requirement("OP-34")
def test_records_that_spark_had_planned_to_settle_are_named_as_lost(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    before = written_log(backbone_settings, keyring)
    settle_topic(backbone_settings, keyring)
    ends = {number: len(records) for number, records in before.items()}
    checkpoint = backbone_settings.state_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    for batch, planned in ((9, ends), (10, ends | {2: ends[2] + 7})):
        source = json.dumps({backbone_settings.kafka.topic: planned})
        (checkpoint / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{source}')
    delete_topic(backbone_settings.kafka)
    plan, _ = rebuild(backbone_settings, keyring)
    assert plan.lost == {2: (ends[2], ends[2] + 7)}


@pytest.mark.requirement("OP-30")
def test_a_header_name_with_a_nul_is_written_as_the_fold_reads_it(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    append_raw(backbone_settings, [Raw(b"job/0a1b2c3d", b"{}", [(any_name(b"ce_id\0more"), b"x")])])
    settle_topic(backbone_settings, keyring)
    delete_topic(backbone_settings.kafka)
    rebuild(backbone_settings, keyring)
    after = [one for records in records_in_topic(backbone_settings).values() for one in records]
    (odd,) = [one for one in after if one.key == b"job/0a1b2c3d"]
    assert odd.header_names == ("ce_id",)
    (row,) = settled_rows([odd], keyring)
    assert (row.verdict, row.reason) == ("rejected", "malformed")
