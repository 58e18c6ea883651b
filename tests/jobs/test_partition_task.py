"""A partition's records, cut into micro-batches on several machines, are settled as in one run."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from connectors.tools.audit.verification import verify
from jobs import build_views
from jobs.maintain_tables import tidy_ledger
from jobs.settling.fold_run import OrderError, settle_run
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring, ensure_keyring
from schemas.settings.settings import Settings
from schemas.state_store.local_store import StoreMoved
from schemas.state_store.partition_store import PartitionStore
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.wire.record import Record
from tests.micro_batches import MicroBatches, records_of
from tests.random_log import RandomLog
from trunkline_agent.errors import TrunklineError

# A stream's last row in a micro-batch has these columns, so they depend on where micro-batches end.
OF_A_MICRO_BATCH = ("changes", "entries", "accepted_offset")
HOSTS = ("one", "two")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with a data directory of their own."""
    return Settings(data_dir=tmp_path / "data")


@pytest.fixture
def keyring(settings: Settings) -> Keyring:
    """The master keys."""
    return ensure_keyring(settings)


@pytest.fixture
def batches(settings: Settings, keyring: Keyring) -> MicroBatches:
    """A query over an empty ledger."""
    return MicroBatches(settings, keyring)


def random_records(keyring: Keyring, count: int, seed: int = 20261126) -> list[Record]:
    return records_of(RandomLog(seed, keyring).records(count))


def in_one_run(records: list[Record], keyring: Keyring) -> pa.Table:
    """The ledger of the records by the fold alone."""
    return pa.Table.from_batches([ledger_batch(settle_run(records, lambda _: Entries(), keyring))])


def assert_settled_as_in_one_run(batches: MicroBatches, records: list[Record]) -> None:
    ledger = dataset_of(DeltaTable(batches.settings.table_path(LEDGER))).to_table().sort_by("offset")
    expected = in_one_run(records, batches.keyring)
    for name in expected.column_names:
        if name not in OF_A_MICRO_BATCH:
            assert ledger[name].to_pylist() == expected[name].to_pylist(), name
    batches.keep()
    assert verify(batches.settings, without_anchors=True).findings == ()


def cut(records: list[Record], most: int, draw: random.Random) -> list[list[Record]]:
    """Cut records into parts of random lengths."""
    parts = []
    while records:
        length = draw.randint(1, most)
        parts.append(records[:length])
        records = records[length:]
    return parts


@pytest.mark.long
@pytest.mark.requirement("ST-01")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_micro_batches_on_machines_in_turn_with_stores_that_get_lost_are_settled_as_one_run(
    batches: MicroBatches, keyring: Keyring, seed: int
) -> None:
    draw, records = random.Random(seed), random_records(keyring, 1500, seed)
    for part in cut(records, 120, draw):
        host = draw.choice(HOSTS)
        trouble = draw.randrange(8)
        if trouble == 0:
            shutil.rmtree(batches.stores(host), ignore_errors=True)
        elif trouble == 1:
            build_views.catch_up(batches.settings)
        elif trouble == 2:
            batches.restart()
        elif trouble == 3:
            # A task that fails after it has settled, or whose machine is gone.
            batches.settle(part, draw.choice(HOSTS))
        elif trouble == 4:
            tidy_ledger(batches.settings)
        batches.run(part, host)
    assert_settled_as_in_one_run(batches, records)


@pytest.mark.long
@pytest.mark.requirement("ST-02")
def test_a_store_of_another_time_or_history_is_brought_to_the_ledgers_end(
    batches: MicroBatches, keyring: Keyring, tmp_path: Path
) -> None:
    records = random_records(keyring, 900)
    store, copy = batches.stores("one"), tmp_path / "copy"
    batches.run(records[:300])
    shutil.copytree(store, copy)
    batches.run(records[300:500])
    # An older copy is put back.
    shutil.rmtree(store)
    shutil.copytree(copy, store)
    batches.run(records[500:600])
    # A store that another ledger made.
    other = MicroBatches(Settings(data_dir=tmp_path / "other"), keyring)
    other.run(random_records(keyring, 600, seed=5))
    shutil.rmtree(store)
    shutil.copytree(other.stores("one"), store)
    batches.run(records[600:])
    assert_settled_as_in_one_run(batches, records)


@pytest.mark.long
@pytest.mark.requirement("ST-02")
@pytest.mark.parametrize("differs", [{"epoch": 2}, {"fold_version": FOLD_VERSION - 1}])
def test_a_store_of_another_epoch_or_fold_version_is_loaded_anew(
    batches: MicroBatches, keyring: Keyring, differs: dict[str, int]
) -> None:
    records = random_records(keyring, 600)
    batches.run(records[:200])
    batches.run(records[200:400])
    batches.bring_forward()
    batches.forget_stores()
    with closing(PartitionStore(batches.stores("one") / "partition-00000")) as store:
        found = store.position()
        assert found is not None
        # As another version or another log has left it: at the same place, with other entries.
        store.load(found, msgspec.structs.replace(found, **differs), [("job/0badcafe", "job", b"other")])
    batches.run(records[400:])
    batches.forget_stores()
    with closing(PartitionStore(batches.stores("one") / "partition-00000")) as store:
        assert store.position() == found
        with store.snapshot() as snapshot:
            assert snapshot.stream("job/0badcafe").get("job") is None
    assert_settled_as_in_one_run(batches, records)


@pytest.mark.long
@pytest.mark.requirement("ST-02")
@pytest.mark.requirement("ST-14")
@pytest.mark.parametrize("keeps_open", [True, False])
def test_a_damaged_store_is_made_anew(batches: MicroBatches, keyring: Keyring, keeps_open: bool) -> None:
    records = random_records(keyring, 900)
    file = batches.stores("one") / "partition-00000" / "data.mdb"

    def spoil() -> None:
        # Each entry of a job contains a sealed secret, which begins so.
        before, sealed = file.read_bytes(), f"{keyring.active}:".encode()
        assert before.count(sealed) > 10
        file.write_bytes(before.replace(sealed, sealed.swapcase()))

    def truncate() -> None:
        os.truncate(file, 3 * 4096)

    def empty() -> None:
        os.truncate(file, 0)

    def overwrite() -> None:
        file.write_bytes(b"not a store" * 10_000)

    def start_the_machine_again() -> None:
        file.with_name("boot_id").write_text("another start")

    batches.run(records[:300])
    first = 300
    for damage in (
        (truncate, empty) if keeps_open else (truncate, empty, spoil, overwrite, start_the_machine_again)
    ):
        if not keeps_open:
            batches.forget_stores()
        damage()
        batches.run(records[first : first + 100])
        first += 100
    batches.run(records[first:])
    assert_settled_as_in_one_run(batches, records)


@pytest.mark.requirement("ST-02")
def test_a_partition_that_was_quiet_until_maintenance_deleted_its_last_file_goes_on(
    batches: MicroBatches, keyring: Keyring
) -> None:
    records = random_records(keyring, 400)
    batches.run(records[:100])
    batches.run(records[100:200])
    (*_, step) = batches.plan().steps[0]
    batches.run(records_of(RandomLog(7, keyring).records(20), partition=1))
    tidy_ledger(batches.settings, 0)
    assert not (Path(batches.settings.table_path(LEDGER)) / step.path).exists()
    batches.run(records[200:])
    ledger = dataset_of(DeltaTable(batches.settings.table_path(LEDGER))).to_table()
    settled = ledger.filter(pc.equal(ledger["partition"], 0)).sort_by("offset")
    expected = in_one_run(records, keyring)
    for name in set(expected.column_names) - set(OF_A_MICRO_BATCH):
        assert settled[name].to_pylist() == expected[name].to_pylist(), name


@pytest.mark.requirement("ST-03")
def test_a_task_that_comes_too_late_settles_nothing(batches: MicroBatches, keyring: Keyring) -> None:
    records = random_records(keyring, 300)
    batches.run(records[:100])
    old = batches.plan()
    batches.run(records[100:200])
    batches.settle(records[200:], "one")
    for late in (records[100:200], records[200:]):
        with pytest.raises(StoreMoved):
            batches.settle(late, "one", old)
    with pytest.raises(OrderError, match="offset 100 comes where 200 must follow"):
        batches.settle(records[100:200], "one")


@pytest.mark.requirement("ST-03")
def test_a_task_that_runs_twice_makes_the_same_rows(batches: MicroBatches, keyring: Keyring) -> None:
    records = random_records(keyring, 400)
    batches.run(records[:200])
    plan = batches.plan()
    first = batches.settle(records[200:], "one", plan)
    assert batches.settle(records[200:], "one", plan) == first
    assert batches.settle(records[200:], "two", plan) == first


@pytest.mark.long
def test_views_that_are_ahead_of_the_ledger_are_named(batches: MicroBatches, keyring: Keyring) -> None:
    records = random_records(keyring, 300)
    batches.run(records[:100])
    old = batches.plan()
    batches.run(records[100:200])
    build_views.catch_up(batches.settings)
    with pytest.raises(TrunklineError, match="build the views anew"):
        batches.settle(records[100:200], "a new machine", old)


@pytest.mark.parametrize("offsets", [[5, 7, 6], [5, 5]])
def test_offsets_that_do_not_rise_stop_the_micro_batch(
    batches: MicroBatches, keyring: Keyring, offsets: list[int]
) -> None:
    records = random_records(keyring, 10)
    batches.run(records[:5])
    with pytest.raises(OrderError, match="must follow"):
        batches.settle([records[offset] for offset in offsets])
