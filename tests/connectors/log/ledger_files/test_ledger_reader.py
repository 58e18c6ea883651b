"""The ledger is read without Spark: whole, its newest rows, and commit by commit as they land."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from connectors.doors.dashboard.past_records import records_between
from connectors.hub.live import table_reader
from connectors.log.ledger_files.ledger_reader import POLL_S, LedgerFilter, LedgerPart, LedgerReader
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW
from tests.connectors.ledger_tables import FIRST_MOMENT_US, STEP_US, LedgerTable, settings_below
from trunkline_agent.errors import NotFound, TrunklineError

JOB = "0a1b2c3d"
WAIT_S = 15.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_below(tmp_path / "a data dir")


@pytest.fixture
def table(settings: Settings) -> LedgerTable:
    """Three commits: a registration and an event; a rejection of another door, one of a stranger; an event."""
    found = LedgerTable(settings)
    found.commit(found.registered(JOB), found.event(JOB, 1, "begins"))
    found.commit(found.message(f"job/{JOB}", b"{", door="xml"), found.message("refused/mqtt", b"what"))
    found.commit(found.event(JOB, 2, "goes on"))
    return found


def _seqs(part: LedgerPart) -> list[int | None]:
    found: list[int | None] = part.rows.column("seq").to_pylist()
    return found


def _follow_first(reader: LedgerReader, count: int, after_version: int | None = None) -> list[LedgerPart]:
    deadline = time.monotonic() + WAIT_S
    found: list[LedgerPart] = []
    for part in reader.follow(after_version, stop=lambda: time.monotonic() > deadline):
        found.append(part)
        if len(found) == count:
            return found
    pytest.fail(f"{len(found)} of {count} commits after {WAIT_S} s")


def test_a_whole_read_gives_all_columns_in_the_order_of_the_log(settings: Settings, table: LedgerTable) -> None:
    part = LedgerReader(settings).rows()
    assert part.version == 2
    assert part.rows.schema.names == LEDGER_ARROW.names
    assert part.rows.column("offset").to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("where", "offsets"),
    [
        (LedgerFilter(stream_kind="job", stream_id=JOB), [0, 1, 2, 4]),
        (LedgerFilter(verdict="rejected"), [2, 3]),
        (LedgerFilter(reason="malformed", door="xml"), [2]),
        (LedgerFilter(door="mqtt"), [1, 3, 4]),
        (LedgerFilter(type="job.registered"), [0]),
        (LedgerFilter(verdict="duplicate"), []),
    ],
)
def test_a_filter_selects_rows(
    settings: Settings, table: LedgerTable, where: LedgerFilter, offsets: list[int]
) -> None:
    reader = LedgerReader(settings)
    assert reader.rows(where).rows.column("offset").to_pylist() == offsets
    assert reader.newest_rows(10, where).rows.column("offset").to_pylist() == offsets
    followed = [o for p in _drain(reader, where) for o in p.rows.column("offset").to_pylist()]
    assert followed == offsets


def _drain(reader: LedgerReader, where: LedgerFilter) -> list[LedgerPart]:
    asked = iter(range(8))
    return list(reader.follow(-1, where, stop=lambda: next(asked, None) is None, poll_s=0.001))


def test_since_is_the_time_of_the_log_and_includes_its_moment(settings: Settings, table: LedgerTable) -> None:
    since = datetime.fromtimestamp((FIRST_MOMENT_US + 3 * STEP_US) / 1e6, UTC)
    reader = LedgerReader(settings)
    assert reader.rows(LedgerFilter(since=since)).rows.num_rows == 2
    assert reader.rows(LedgerFilter(since=since + timedelta(microseconds=1))).rows.num_rows == 1


def test_chosen_columns_come_alone_and_in_their_order(settings: Settings, table: LedgerTable) -> None:
    reader = LedgerReader(settings)
    columns = ["seq", "verdict"]
    assert reader.rows(columns=columns).rows.schema.names == columns
    assert reader.newest_rows(2, columns=columns).rows.schema.names == columns
    assert _follow_first(reader, 1, -1)[0].rows.schema.names == LEDGER_ARROW.names


def test_the_newest_rows_are_the_last_of_the_log_oldest_first(settings: Settings, table: LedgerTable) -> None:
    reader = LedgerReader(settings)
    part = reader.newest_rows(2)
    assert part.rows.column("offset").to_pylist() == [3, 4]
    assert part.version == 2
    assert reader.newest_rows(0).rows.num_rows == 0
    assert reader.newest_rows(2, LedgerFilter(type="job.event", verdict="accepted")).rows.num_rows == 2


@pytest.mark.long
def test_the_newest_rows_are_found_when_a_compaction_has_written_old_rows_into_new_files(
    settings: Settings, table: LedgerTable
) -> None:
    # The newest rows lie in a file that is too large for the compaction and stays; what is old is written anew,
    # into more files than are read at once.
    for seq in range(3, 30):
        table.commit(table.event(JOB, seq, "old"))
    table.commit(*(table.event(JOB, seq, "new " + "x" * 400) for seq in range(30, 300)))
    sizes = sorted(file.stat().st_size for file in Path(table.path).glob("*.parquet"))
    DeltaTable(table.path).optimize.compact(target_size=sum(sizes[:4]), max_concurrent_tasks=1)
    files = pa.table(DeltaTable(table.path).get_add_actions(flatten=True)).sort_by("modification_time")
    assert files.num_rows > 5
    assert files.column("max.seq")[0].as_py() == 299
    reader = LedgerReader(settings)
    assert _seqs(reader.newest_rows(3)) == [297, 298, 299]
    assert _seqs(reader.newest_rows(272)) == list(range(28, 300))


def test_rows_of_one_moment_are_in_order_and_a_file_without_statistics_is_read_first(
    settings: Settings, table: LedgerTable
) -> None:
    same = [
        row._replace(logged_at=FIRST_MOMENT_US) for row in (table.event(JOB, s, "more") for s in range(3, 9))
    ]
    for row in reversed(same):
        table.commit(row)
    reader = LedgerReader(settings)
    where = LedgerFilter(type="job.event", verdict="accepted")
    assert _seqs(reader.newest_rows(8, where)) == [*range(3, 9), 1, 2]
    assert _seqs(reader.newest_rows(3, where)) == [8, 1, 2]
    log = Path(table.path) / "_delta_log" / f"{2:020d}.json"
    actions = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    for action in actions:
        action.get("add", {}).pop("stats", None)
    log.write_text("\n".join(json.dumps(action) for action in actions), encoding="utf-8")
    assert _seqs(reader.newest_rows(1, where)) == [2]


def test_following_from_the_first_commit_gives_each_commit_once(settings: Settings, table: LedgerTable) -> None:
    parts = _follow_first(LedgerReader(settings), 3, -1)
    assert [part.version for part in parts] == [0, 1, 2]
    assert [part.rows.num_rows for part in parts] == [2, 2, 1]


def test_a_new_commit_is_seen_soon(settings: Settings, table: LedgerTable) -> None:
    reader = LedgerReader(settings)
    seen: list[tuple[float, LedgerPart]] = []
    over = threading.Event()

    def follow() -> None:
        for part in reader.follow(None, stop=over.is_set):
            seen.append((time.monotonic(), part))

    follower = threading.Thread(target=follow)
    follower.start()
    landed: list[float] = []
    try:
        for seq in range(3, 8):
            table.commit(table.event(JOB, seq, "more"))
            landed.append(time.monotonic())
            deadline = landed[-1] + WAIT_S
            while len(seen) < len(landed) and time.monotonic() < deadline:
                over.wait(0.005)
    finally:
        over.set()
        follower.join(WAIT_S)
    assert [_seqs(part) for _, part in seen] == [[3], [4], [5], [6], [7]]
    delays = sorted(at - commit for commit, (at, _) in zip(landed, seen, strict=True))
    # A tenth of a second is the reader's own; the rest is for a slow machine.
    assert POLL_S <= 0.1
    assert delays[len(delays) // 2] < 0.8


@pytest.mark.long
def test_following_waits_for_a_table_that_does_not_exist_yet(settings: Settings) -> None:
    reader = LedgerReader(settings)
    table = LedgerTable(settings)
    row = table.registered(JOB)
    late = threading.Timer(0.3, table.commit, [row])
    late.start()
    try:
        assert _follow_first(reader, 1)[0].rows.num_rows == 1
    finally:
        late.join()


def test_files_that_a_compaction_writes_are_no_new_rows(settings: Settings, table: LedgerTable) -> None:
    DeltaTable(table.path).optimize.compact()
    table.commit(table.event(JOB, 3, "after it"))
    parts = _follow_first(LedgerReader(settings), 4, -1)
    assert [part.version for part in parts] == [0, 1, 2, 4]
    assert sum(part.rows.num_rows for part in parts) == LedgerReader(settings).rows().rows.num_rows == 6


def test_no_table_is_an_error_that_says_what_to_do(settings: Settings) -> None:
    reader = LedgerReader(settings)
    assert reader.version() is None
    for read in (reader.rows, lambda: reader.newest_rows(1)):
        with pytest.raises(NotFound, match="trunkline up"):
            read()


def test_commits_that_are_gone_from_the_log_are_an_error(settings: Settings, table: LedgerTable) -> None:
    DeltaTable(table.path).create_checkpoint()
    (Path(table.path) / "_delta_log" / f"{1:020d}.json").unlink()
    with pytest.raises(TrunklineError, match="commit 1 of the ledger"):
        _follow_first(LedgerReader(settings), 3, -1)


def test_a_file_that_is_gone_from_the_table_is_an_error(settings: Settings, table: LedgerTable) -> None:
    for file in Path(table.path).glob("*.parquet"):
        file.unlink()
    with pytest.raises(TrunklineError, match="gone since its commit"):
        _follow_first(LedgerReader(settings), 1, -1)


def test_a_file_name_with_escapes_in_the_log_is_found(settings: Settings, table: LedgerTable) -> None:
    log = Path(table.path) / "_delta_log" / f"{2:020d}.json"
    actions = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    add = next(action["add"] for action in actions if "add" in action)
    (Path(table.path) / add["path"]).rename(Path(table.path) / "a part.parquet")
    add["path"] = "a%20part.parquet"
    log.write_text("\n".join(json.dumps(action) for action in actions), encoding="utf-8")
    reader = LedgerReader(settings)
    assert _seqs(_follow_first(reader, 3, -1)[-1]) == [2]
    assert _seqs(reader.newest_rows(1)) == [2]
    assert reader.rows().rows.num_rows == 5


@pytest.mark.requirement("LM-14")
def test_the_newest_rows_are_bounded_in_bytes_and_one_always_comes(settings: Settings) -> None:
    table = LedgerTable(settings)
    for number in range(6):
        table.commit(table.message(f"job/{JOB}", b"x" * 1000), table.message(f"job/{number:08x}", b"y" * 1000))
    reader, where = LedgerReader(settings), LedgerFilter(stream_id=JOB)

    for bytes_most, offsets in ((3500, [6, 8, 10]), (1, [10]), (10**9, [0, 2, 4, 6, 8, 10])):
        found = reader.newest_rows(1000, where, bytes_most=bytes_most)
        assert found.rows.column("offset").to_pylist() == offsets


@pytest.mark.requirement("LM-14")
def test_records_that_a_reader_missed_are_bounded_in_bytes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = LedgerTable(settings)
    for _ in range(6):
        table.commit(*(table.message(f"job/{JOB}", b"x" * 1000) for _ in range(20)))
    assert len(records_between(settings, {0: (0, 120)})) == 120
    monkeypatch.setattr(table_reader, "READ_BYTES_MOST", 50_000)

    found = records_between(settings, {0: (0, 120)})

    assert 0 < sum(len(record.value or b"") for record in found) <= 50_000
