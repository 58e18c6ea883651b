"""The local store of a gateway: rows that end, come back and change lists, and damage."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgspec
import pytest

from schemas.fold.view_rows import Row
from schemas.state_store import ended_lists, gateway_store, local_store
from schemas.state_store.ended_lists import WHOLE, Span
from schemas.state_store.gateway_store import GatewayStore, LogPlace
from schemas.state_store.local_store import StoreClosed, StoreDamaged, StoreMoved
from schemas.streams.fold import VIEWS
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import MessageBodyRow, MessageRow

JOBS = JobRow.VIEW
START = LogPlace(1, 9, "form", {0: 0}, {}, {}, {})


def place(offset: int) -> LogPlace:
    return msgspec.structs.replace(START, offsets={0: offset}, digests={0: f"digest {offset}"})


def job(name: str, status: str, registered_at: int) -> JobRow:
    nothing = dict.fromkeys(JobRow.__struct_fields__)
    known = {"job_id": name, "status": status, "registered_at": registered_at, "notify": ["end"]}
    return JobRow(**{**nothing, **known})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatewayStore]:
    made = GatewayStore(tmp_path / "store")
    made.finish_load(START)
    yield made
    made.close()


def put(store: GatewayStore, *rows: JobRow | str) -> None:
    """Write rows one place further; a text is the key of a row that is removed."""
    before = store.position()
    assert before is not None
    at = before.offsets[0]
    changes = [(JOBS, r, (at, None)) if isinstance(r, str) else (JOBS, r.job_id, (at, r)) for r in rows]
    store.advance(before, place(at + 1), [], changes)


def listed(store: GatewayStore, name: str, span: Span = WHOLE) -> list[str]:
    found = [key for _, key in store.newest_ended(JOBS, name, span)]
    assert store.count_ended(JOBS, name, span, ()) == len(found)
    return found


@pytest.mark.requirement("ST-31")
def test_a_row_is_among_the_live_or_the_ended_ones_and_in_the_lists_that_it_names(store):
    put(store, job("a", "running", 5), job("b", "completed", 7), job("c", "completed", 6))
    assert [key for key, _ in store.live_rows(JOBS)] == ["a"]
    assert store.ended(JOBS, "a") is None
    assert store.ended(JOBS, "b") == (0, job("b", "completed", 7))
    assert listed(store, "completed") == ["b", "c"]
    put(store, job("a", "error", 5), job("b", "error", 7), job("c", "running", 6))
    assert [key for key, _ in store.live_rows(JOBS)] == ["c"]
    assert (listed(store, "completed"), listed(store, "error")) == ([], ["b", "a"])
    assert listed(store, "error", Span(since=6)) == ["b"]
    assert listed(store, "error", Span(before=(7, "b"))) == list(store.oldest_ended(JOBS, "error"))[:1] == ["a"]
    assert store.count_ended(JOBS, "error", WHOLE, ["a", "c", "no such row"]) == 1
    put(store, "b", "c")
    assert listed(store, "error") == ["a"]
    assert dict(store.live_rows(JOBS)) == {"b": (2, None), "c": (2, None)}


@pytest.mark.parametrize("key", ["default/system/\xe9", "default/system/" + "x" * 600, "\udcff", ""])
def test_there_is_no_row_under_a_key_that_no_row_can_have(store, key):
    assert store.ended(MessageRow.VIEW, key) is None


def test_lists_and_scans_of_thousands_of_rows_are_whole_and_in_order(store):
    put(store, *(job(f"{number:08x}", "completed", number // 3) for number in range(2500)))
    assert listed(store, "completed") == [f"{number:08x}" for number in reversed(range(2500))]
    assert [key for key, _ in store.ended_rows(JOBS)] == [f"{number:08x}" for number in range(2500)]


@pytest.mark.requirement("ST-70")
@pytest.mark.parametrize("blocks", [(6, 3), (34, 25)])
def test_the_number_of_rows_in_any_part_of_a_list_is_that_of_a_scan(store, monkeypatch, blocks):
    monkeypatch.setattr(ended_lists, "_BLOCKS", blocks)
    draw, known = random.Random(1), dict[str, JobRow]()
    for _ in range(12):
        rows: list[JobRow | str] = [
            job(
                f"{draw.randrange(150):08x}",
                draw.choice(["completed", "error", "running"]),
                draw.randrange(300),
            )
            for _ in range(30)
        ]
        removed = draw.choice(list(known) or [""])
        put(store, *rows, *([removed] if removed else []))
        known |= {row.job_id: row for row in rows if isinstance(row, JobRow)}
        known.pop(removed, None)
        places = sorted((row.registered_at, row.job_id) for row in known.values() if row.status == "completed")
        for _ in range(50):
            since, before = (
                draw.randrange(310),
                draw.choice([None, (draw.randrange(310), ""), draw.choice(places)]),
            )
            expected = [one for one in places if one[0] >= since and (before is None or one < before)]
            assert store.count_ended(JOBS, "completed", Span(since, before), ()) == len(expected)
    put(store, *known)
    with store._reading() as transaction, transaction.cursor() as cursor:
        assert not cursor.set_range(b"\x03") or bytes(cursor.key()) >= b"\x06", "no count is left"


@pytest.mark.requirement("ST-70")
def test_to_count_a_part_of_a_list_does_not_take_longer_the_more_rows_it_has(tmp_path):
    times: list[float] = []
    for count in (500, 30_000):
        made = GatewayStore(tmp_path / str(count), is_synced=False)
        # An hour of jobs.
        moments = (number * 3_600_000_000 // count for number in range(count))
        rows = (job(f"{number:08x}", "completed", at) for number, at in enumerate(moments))
        made.load([], ((JOBS, row.job_id, (0, row)) for row in rows))
        part, found = Span(60_000_000, (3_000_000_000, "")), list[float]()
        for _ in range(20):
            began = time.process_time()
            number = made.count_ended(JOBS, "completed", part, ())
            found.append(time.process_time() - began)
        assert abs(number - count * 49 / 60) <= 1
        times.append(min(found))
        made.close()
    assert times[1] < 10 * times[0]


def message(name: str, status: str, ended_at: int | None) -> MessageRow:
    nothing = dict.fromkeys(MessageRow.__struct_fields__)
    known = {"realm": "default", "recipient": "bo", "message_id": name, "status": status, "ended_at": ended_at}
    return MessageRow(**{**nothing, **known})


@pytest.mark.requirement("ST-31")
def test_of_the_messages_in_each_final_status_the_newest_stay_with_their_bodies(store, monkeypatch):
    monkeypatch.setattr(gateway_store, "FINAL_MESSAGES_KEPT", 3)
    for begin in range(0, 12, 4):
        sent = [message(f"{n:02}", ("claimed", "dead")[n % 2], 99 - n) for n in range(begin, begin + 4)]
        rows: list[Row] = [*sent, *(MessageBodyRow("default", "bo", row.message_id, "b", "t") for row in sent)]
        rows.append(message("w", "unread", None))
        store.advance(store.position(), store.position(), [], [(row.VIEW, row.key, (0, row)) for row in rows])
        kept = sorted(row[0] for row in store.ended_rows(MessageRow.VIEW))
        bodies = sorted(row[0] for row in store.ended_rows(MessageBodyRow.VIEW))
        assert kept == bodies == [f"default/bo/{n:02}" for n in range(min(6, begin + 4))]
    for status in ("claimed", "dead"):
        found = list(store.newest_ended(MessageRow.VIEW, status, WHOLE))
        assert len(found) == store.count_ended(MessageRow.VIEW, status, WHOLE, ()) == 3
    assert len(list(store.live_rows(MessageRow.VIEW))) == 1


@pytest.mark.long
def test_a_store_that_is_as_large_as_its_map_grows_when_it_is_opened_anew(store, monkeypatch):
    monkeypatch.setattr(local_store, "_MAP_BYTES", 1 << 20)
    store.reopen()
    rows = [
        msgspec.structs.replace(job(f"{n:08x}", "completed", n), description="x" * 1000) for n in range(700)
    ]
    with pytest.raises(lmdb.MapFullError):
        for row in rows:
            put(store, row)
    assert len(listed(store, "completed")) < 700
    store.reopen()
    put(store, *rows)
    assert len(listed(store, "completed")) == 700


def test_every_kind_of_row_comes_out_of_the_store_as_it_was(store):
    for view, row_type in VIEWS.items():
        fields = dict.fromkeys(row_type.__struct_fields__) | dict.fromkeys(row_type.KEY, "name")
        row = row_type(**fields)
        store.advance(store.position(), store.position(), [], [(view, row.key, (3, row))])
        found = dict(store.live_rows(view)).get(row.key) or store.ended(view, row.key)
        assert found == (3, row)


@pytest.mark.requirement("ST-30")
def test_a_change_from_another_place_is_refused_and_changes_nothing(store):
    put(store, job("a", "running", 5))
    with pytest.raises(StoreMoved):
        store.advance(START, place(9), [("job/a", "job", b"1")], [])
    assert store.entry("job/a", "job") is None
    with pytest.raises(StoreMoved):
        store.load([("job/a", "job", b"1")], [])


@pytest.mark.requirement("ST-32")
def test_a_changed_value_is_noticed_when_it_is_read(store, tmp_path):
    put(store, msgspec.structs.replace(job("a", "completed", 5), description="the text of the job"))
    store.close()
    file = tmp_path / "store" / "data.mdb"
    file.write_bytes(file.read_bytes().replace(b"the text of the job", b"the text of the jab"))
    damaged = GatewayStore(tmp_path / "store")
    with pytest.raises(StoreDamaged, match="registry_jobs"):
        damaged.ended(JOBS, "a")
    damaged.close()


def test_a_closed_store_is_not_read(store):
    scan = store.ended_rows(JOBS)
    store.close()
    with pytest.raises(StoreClosed):
        next(scan)
    with pytest.raises(StoreClosed):
        store.position()


@pytest.mark.long
@pytest.mark.requirement("ST-31")
def test_a_store_that_is_mapped_anew_takes_no_memory_and_disturbs_no_reader_and_no_writer(store):
    rows = [job(f"{number:08x}", "completed", number) for number in range(5000)]
    put(store, *rows)
    ended, found, failures = threading.Event(), set(), []

    def read() -> None:
        try:
            while not ended.is_set():
                found.add(len(list(store.ended_rows(JOBS))))
                # Without a moment between two reads the store would not be mapped anew.
                time.sleep(0.002)
        except Exception as error:
            failures.append(error)

    reader, began = threading.Thread(target=read), time.monotonic()
    reader.start()
    try:
        for number in range(100):
            store.reopen()
            put(store, job("ffffffff", "completed", number))
    finally:
        ended.set()
        reader.join(30)
    assert time.monotonic() - began < 50, "most calls waited for a second in vain"
    assert (found - {5000}, failures) == ({5001}, [])
    store.reopen()
    before = mapped_bytes()
    assert len(list(store.ended_rows(JOBS))) == 5001
    touched = mapped_bytes()
    store.reopen()
    assert touched > 2 * before
    assert mapped_bytes() <= before


@pytest.mark.requirement("ST-31")
def test_a_read_does_not_wait_while_another_one_keeps_a_store_from_being_mapped_anew(store):
    put(store, job("a", "completed", 5))
    with store._reading():
        mapping = threading.Thread(target=store.reopen)
        mapping.start()
        slowest, ended_at = 0.0, time.monotonic() + 0.5
        while time.monotonic() < ended_at:
            began = time.monotonic()
            assert store.ended(JOBS, "a") is not None
            slowest = max(slowest, time.monotonic() - began)
        assert mapping.is_alive()
    mapping.join()
    assert slowest < 0.3


def test_a_store_whose_folder_was_deleted_goes_on_with_its_open_file(store, tmp_path):
    put(store, job("a", "completed", 5))
    shutil.rmtree(tmp_path / "store")
    store.reopen()
    put(store, job("b", "completed", 6))
    assert listed(store, "completed") == ["b", "a"]
    assert not (tmp_path / "store").exists()


def mapped_bytes() -> int:
    """How much memory the pages of the store take in this process."""
    of_file = Path("/proc/self/smaps").read_text().partition("store/data.mdb")[2]
    return int(of_file.partition("Rss:")[2].split()[0]) * 1024
