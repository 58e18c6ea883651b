"""The live view's local store on a real Kafka: kills, a store of another time or log, and a full disk."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from connectors.hub.live import live_store, store_writer
from connectors.hub.live.live_store import LiveStore
from connectors.hub.live.live_view import LiveView
from connectors.log.kafka_libraries import to_record
from schemas.keys.record_macs import GATEWAY
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.state_store.gateway_store import GatewayStore
from schemas.state_store.local_store import StoreDamaged
from schemas.streams.job.job_registry import JobRow
from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.live.test_live_view import JOB, assert_agrees
from tests.connectors.tools.log_rebuild.test_log_rebuild import made_anew
from tests.jobs.topic_load import event, registration
from tests.random_log import RandomLog
from tests.raw_records import append_raw, raw, read_to_end, with_mac
from trunkline_agent.errors import BackboneUnreachable, TrunklineError


@contextmanager
def viewed(settings: Settings, keyring: Keyring) -> Iterator[LiveView]:
    """An open live view on the store in the data directory."""
    view = LiveView(settings, keyring, settings.state_path / "view")
    try:
        view.open()
        yield view
    finally:
        view.close()


def folded_log(settings: Settings, keyring: Keyring) -> FoldedLog:
    """The fold of the whole log, record by record."""
    folded = FoldedLog(keyring)
    for record in sorted(
        map(to_record, read_to_end(settings.kafka)), key=lambda one: (one.partition, one.offset)
    ):
        folded.add(record)
    return folded


def began_at(view: LiveView) -> dict[int, int]:
    """The offsets of the store at the view's start, of partitions that have records."""
    assert view._store is not None
    return {number: offset for number, offset in view._store.began_at.items() if offset}


def store_file(settings: Settings) -> Path:
    """The file of the store."""
    return settings.state_path / "view" / "store" / "data.mdb"


def said(process: ProgramProcess) -> dict[str, Any]:
    """The last line that a viewing process has printed."""
    lines = [one for one in process.log().splitlines(keepends=True) if one[0] == "{" and one[-1] == "\n"]
    return dict(json.loads(lines[-1])) if lines else {}


@pytest.fixture
def filled(backbone_settings: Settings, keyring: Keyring) -> dict[int, int]:
    """A store of a log full of trouble, whose view has ended. Returns the log's end."""
    append_raw(backbone_settings, RandomLog(5, keyring).records(400))
    with viewed(backbone_settings, keyring) as view:
        return {number: end for number, end in view.next_offsets().items() if end}


def is_behind(figures: dict[str, Any]) -> bool:
    """True if a viewing process had settled records that its store had not."""
    return bool(figures["view"] != figures["store"])


def wait_settled(process: ProgramProcess, ends: dict[int, int], which: str = "view") -> None:
    """Wait until the process says that its view, or its store, is at these offsets."""
    wanted = {str(number): end for number, end in ends.items()}
    wait_until(lambda: said(process)[which].items() >= wanted.items(), 60, f"the {which} is at {ends}")


@pytest.mark.requirement("ST-30")
def test_a_view_that_is_killed_between_two_writes_goes_on_at_the_stores_offsets(
    backbone_settings, keyring, tmp_path
):
    log, lagged = RandomLog(6, keyring), 0
    for _ in range(3):
        process = ProgramProcess("tests.connectors.hub.live.viewing_process", backbone_settings, tmp_path)
        try:
            process.wait_ready()
            append_raw(backbone_settings, log.records(400))
            wait_settled(process, folded_log(backbone_settings, keyring).next_offsets, "store")
            append_raw(backbone_settings, log.records(100))
            # The store is written a second later.
            wait_until(lambda seen=process: is_behind(said(seen)), 60, "records that are not in the store")
        finally:
            process.kill()
        lagged += is_behind(said(process))
        with viewed(backbone_settings, keyring) as view:
            assert sum(began_at(view).values()) >= 400
            assert_agrees(view, folded_log(backbone_settings, keyring))
    assert lagged, "no kill came between two writes"


@pytest.mark.requirement("ST-30")
def test_a_view_that_was_closed_starts_at_the_logs_end(backbone_settings, keyring, filled):
    folded = folded_log(backbone_settings, keyring)
    # The second time there is nothing to write.
    for _ in range(2):
        with viewed(backbone_settings, keyring) as view:
            assert began_at(view) == filled
            assert_agrees(view, folded)


def deleted(settings: Settings) -> None:
    shutil.rmtree(settings.state_path)


def truncated(settings: Settings) -> None:
    with store_file(settings).open("r+b") as file:
        file.truncate(store_file(settings).stat().st_size // 2)


def overwritten(settings: Settings) -> None:
    store_file(settings).write_bytes(b"no store" * 4096)


def unproven(settings: Settings) -> None:
    (settings.state_path / "view" / "unproven").touch()


def replaced(settings: Settings, **fields: Any) -> None:
    store = GatewayStore(store_file(settings).parent)
    place = store.position()
    assert place is not None
    store.advance(place, msgspec.structs.replace(place, **fields), [], [])
    store.close()


def other_epoch(settings: Settings) -> None:
    replaced(settings, epoch=7)


def other_fold(settings: Settings) -> None:
    replaced(settings, fold_version=1)


def other_columns(settings: Settings) -> None:
    replaced(settings, form="of another program")


def beyond_the_log(settings: Settings) -> None:
    replaced(settings, offsets=dict.fromkeys(range(4), 100_000))


@pytest.mark.requirement("ST-32")
@pytest.mark.parametrize(
    "spoil",
    [deleted, truncated, overwritten, unproven, other_epoch, other_fold, other_columns, beyond_the_log],
    ids=lambda spoil: spoil.__name__,
)
def test_a_store_that_cannot_be_used_is_made_again(backbone_settings, keyring, filled, spoil):
    spoil(backbone_settings)
    with viewed(backbone_settings, keyring) as view:
        assert began_at(view) == {}
        assert_agrees(view, folded_log(backbone_settings, keyring))
    with viewed(backbone_settings, keyring) as view:
        assert began_at(view) == filled


@pytest.mark.requirement("ST-32")
def test_an_older_copy_of_the_store_is_brought_forward(backbone_settings, keyring, filled, tmp_path):
    shutil.copy(store_file(backbone_settings), tmp_path / "older")
    append_raw(backbone_settings, RandomLog(8, keyring).records(200))
    with viewed(backbone_settings, keyring):
        pass
    shutil.copy(tmp_path / "older", store_file(backbone_settings))
    with viewed(backbone_settings, keyring) as view:
        assert began_at(view) == filled
        assert_agrees(view, folded_log(backbone_settings, keyring))


@pytest.mark.requirement("ST-32")
def test_a_start_that_ends_because_kafka_is_away_leaves_the_store(
    backbone_settings, keyring, filled, monkeypatch
):
    monkeypatch.setattr(live_store, "_READ_WITHIN_S", 1.0)
    kafka = backbone_settings.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    away = backbone_settings.model_copy(update={"kafka": kafka})
    with pytest.raises(BackboneUnreachable):
        LiveStore(away, keyring, store_file(backbone_settings).parent.parent, filled, pytest.fail)
    with viewed(backbone_settings, keyring) as view:
        assert began_at(view) == filled


@pytest.mark.requirement("ST-33")
def test_a_log_that_lost_its_records_and_grew_again_is_noticed(backbone_settings, keyring, filled, tmp_path):
    made_anew(backbone_settings, tmp_path)
    append_raw(backbone_settings, RandomLog(9, keyring).records(900))
    folded = folded_log(backbone_settings, keyring)
    assert all(folded.next_offsets[number] >= end for number, end in filled.items()), (
        "the log is not long enough"
    )
    with viewed(backbone_settings, keyring) as view:
        assert began_at(view) == {}
        assert_agrees(view, folded)


@pytest.mark.requirement("ST-34")
def test_a_second_view_in_the_same_folder_is_refused_with_a_clear_error(backbone_settings, keyring):
    with viewed(backbone_settings, keyring) as first:
        second = LiveView(backbone_settings, keyring, backbone_settings.state_path / "view")
        with pytest.raises(TrunklineError, match=r"another gateway uses the state store .* gateway\.port"):
            second.open()
        second.close()
        append_raw(backbone_settings, [with_mac(raw(registration(JOB, keyring)), keyring.mac_key(GATEWAY))])
        first.catch_up(20)
        assert first.get(JobRow, JOB) is not None, "the first one goes on"


@pytest.mark.requirement("ST-31")
def test_an_ended_job_is_read_through_and_leaves_memory(backbone_settings, keyring):
    sent = [registration(JOB, keyring), event(JOB, 1), event(JOB, 2, "completed")]
    append_raw(backbone_settings, [with_mac(raw(one), keyring.mac_key(GATEWAY)) for one in sent])
    with viewed(backbone_settings, keyring) as view:
        assert view.live(JobRow) == []
    with viewed(backbone_settings, keyring) as view:
        assert not view._state._live[JobRow.VIEW]
        row = view.get(JobRow, JOB)
        assert row is not None and row.status == "completed" and row.last_seq == 2
        assert view.all(JobRow) == list(view.newest_ended(JobRow, "completed")) == [row]
        assert (view.count_ended(JobRow, "completed"), view.count_ended(JobRow, "error")) == (1, 0)
        assert view.oldest_ended(JobRow, "completed") == row
        append_raw(backbone_settings, [raw(event(JOB, 2, "completed"))])
        view.catch_up(20)
        records, _ = view.feed.since(0, 10)
        assert [one.verdict for one in records] == ["duplicate"]


@pytest.mark.requirement("ST-32")
def test_a_view_that_reads_a_damaged_row_stops_and_the_next_start_makes_a_new_store(backbone_settings, keyring):
    sent = [registration(JOB, keyring), event(JOB, 1), event(JOB, 2, "completed")]
    append_raw(backbone_settings, [with_mac(raw(one), keyring.mac_key(GATEWAY)) for one in sent])
    with viewed(backbone_settings, keyring) as view:
        known = view.get(JobRow, JOB)
    file = store_file(backbone_settings)
    assert known is not None and known.ended_by is not None
    file.write_bytes(file.read_bytes().replace(known.ended_by.encode(), b"x" * len(known.ended_by)))
    with viewed(backbone_settings, keyring) as view:
        assert view.failure is None
        with pytest.raises(StoreDamaged, match=JOB):
            view.get(JobRow, JOB)
        assert isinstance(view.failure, StoreDamaged)
    with viewed(backbone_settings, keyring) as view:
        assert began_at(view) == {}
        assert view.get(JobRow, JOB) == known


@pytest.mark.requirement("ST-35")
def test_on_a_full_disk_the_view_goes_on_and_writes_when_there_is_space_again(
    backbone_settings, keyring, tmp_path
):
    log = RandomLog(11, keyring)
    append_raw(backbone_settings, log.records(100))
    process = ProgramProcess("tests.connectors.hub.live.viewing_process", backbone_settings, tmp_path)
    try:
        process.wait_ready()
        wait_until(lambda: said(process).get("store") == said(process).get("view"), 30, "the store is written")
        pid = process.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        # Its log is in a file, too, so the limit is above that file's size.
        limit = store_file(backbone_settings).stat().st_size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
        append_raw(backbone_settings, log.records(600))
        wait_until(lambda: said(process).get("trouble"), 60, "the write fails")
        assert "state_store_not_written" in process.log()
        ends = folded_log(backbone_settings, keyring).next_offsets
        wait_settled(process, ends)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        wait_settled(process, ends, "store")
        assert said(process)["trouble"] is None
    finally:
        process.kill()


@pytest.mark.requirement("ST-35")
def test_a_view_whose_changes_cannot_be_written_ends_before_they_fill_the_memory(
    backbone_settings, keyring, tmp_path, monkeypatch
):
    monkeypatch.setenv("VIEW_MOST_RECORDS", "300")
    log = RandomLog(12, keyring)
    append_raw(backbone_settings, log.records(400))
    with viewed(backbone_settings, keyring):
        pass
    process = ProgramProcess("tests.connectors.hub.live.viewing_process", backbone_settings, tmp_path)
    try:
        process.wait_ready()
        pid = process.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (store_file(backbone_settings).stat().st_size, hard))
        append_raw(backbone_settings, log.records(1000))
        wait_until(lambda: said(process).get("failure"), 60, "the view ends")
        assert "the state store cannot be written (" in said(process)["failure"]
        assert "set storage.state to a folder on another one" in said(process)["failure"]
    finally:
        process.kill()
    with viewed(backbone_settings, keyring) as view:
        assert_agrees(view, folded_log(backbone_settings, keyring))


@pytest.mark.requirement("ST-35")
def test_a_full_disk_during_a_start_from_tables_is_an_error_that_names_the_setting(
    backbone_settings, keyring, tmp_path, monkeypatch
):
    append_raw(backbone_settings, RandomLog(13, keyring).records(600))
    folded = folded_log(backbone_settings, keyring)
    folded.write_entries(backbone_settings, folded.next_offsets)
    folded.write_rows(backbone_settings)
    monkeypatch.setenv("VIEW_FILE_BYTES", "65536")
    process = ProgramProcess("tests.connectors.hub.live.viewing_process", backbone_settings, tmp_path)
    try:
        wait_until(lambda: process.process.poll() is not None, 60, "the start ends")
    finally:
        process.kill()
    last = process.log().strip().splitlines()[-1]
    assert last.startswith("trunkline_agent.errors.TrunklineError: the state store ")
    assert "set storage.state to a folder on another one" in last


@pytest.mark.requirement("ST-35")
def test_a_writer_pauses_between_attempts_however_much_waits(backbone_settings, keyring, monkeypatch):
    monkeypatch.setattr(store_writer, "_SOON_RECORDS", 1)
    attempts: list[float] = []

    def full(*_: object) -> None:
        attempts.append(time.monotonic())
        raise lmdb.DiskError("No space left on device")

    monkeypatch.setattr(GatewayStore, "advance", full)
    append_raw(backbone_settings, RandomLog(14, keyring).records(50))
    with viewed(backbone_settings, keyring) as view:
        wait_until(lambda: attempts, 30, "the first attempt")
        while time.monotonic() < attempts[0] + 1.5:
            assert view._store is not None
            view._store.keep_up()
            time.sleep(0.01)
        # Pauses of 0.1, 0.2, 0.4 and 0.8 seconds.
        assert 2 <= len(attempts) <= 6
