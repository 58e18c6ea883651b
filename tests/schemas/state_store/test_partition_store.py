"""The local store of a partition: its changes are all or nothing, from one position to the next."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import closing
from pathlib import Path

import pytest

from schemas.state_store import local_store
from schemas.state_store.local_store import StoreDamaged, StoreMoved, boot_id
from schemas.state_store.partition_store import EntryChange, PartitionStore, Position
from tests.broker_processes import PROJECT_ROOT
from trunkline_agent.errors import TrunklineError

JOB, OTHER = "job/0badcafe", "job/0badcaff"


def at(offset: int, chain: str = "c") -> Position:
    """The position after the records before an offset."""
    return Position("table", 1, 9, offset, chain)


def content(store: PartitionStore, stream: str = JOB) -> dict[str, bytes]:
    with store.snapshot() as snapshot:
        stored = snapshot.stream(stream)
        return {key: stored.get(key) or b"" for key in stored.keys("", "", 1000)}


@pytest.fixture
def store(tmp_path: Path) -> PartitionStore:
    """A store at offset 1 with two streams."""
    made = PartitionStore(tmp_path / "a store")
    made.load(
        None, at(1), [(JOB, "job", b"1"), (JOB, "progress", b"p"), (OTHER, "job", b"2"), (JOB, "id/0ff", b"i")]
    )
    return made


def test_a_new_store_has_no_position_and_no_entries(tmp_path: Path) -> None:
    store = PartitionStore(tmp_path / "new")
    assert store.position() is None
    assert content(store) == {}


@pytest.mark.requirement("ST-11")
def test_entries_of_a_stream_are_read_by_key_and_in_order_without_those_of_others(
    store: PartitionStore,
) -> None:
    more = [(JOB, "a", b"first"), (JOB, "ie", b"after"), (JOB, "z", b""), ("job", "x", b"y")]
    store.advance(at(1), at(2), more)
    everything = ["a", "id/0ff", "ie", "job", "progress", "z"]
    assert content(store) == dict(zip(everything, [b"first", b"i", b"after", b"1", b"p", b""], strict=True))
    with store.snapshot() as snapshot:
        stored = snapshot.stream(JOB)
        assert stored.keys("", "", 2) == everything[:2]
        assert stored.keys("", "id/0ff", 2) == everything[2:4]
        assert stored.keys("i", "", 9) == stored.keys("i", "a", 9) == ["id/0ff", "ie"]
        assert stored.keys("i", "id/0ff", 9) == ["ie"]
        assert stored.keys("i", "j", 9) == stored.keys("y", "", 9) == []
        assert snapshot.stream(JOB).get("id/0ff") == b"i"
        assert snapshot.stream(JOB).get("nothing") is None
        assert snapshot.position == at(2)


def test_a_change_deletes_and_replaces_entries(store: PartitionStore) -> None:
    store.advance(at(1), at(5), [(JOB, "progress", None), (JOB, "job", b"new"), (JOB, "absent", None)])
    assert content(store) == {"job": b"new", "id/0ff": b"i"}
    assert store.position() == at(5)


@pytest.mark.parametrize(
    "other",
    [
        at(2),
        at(1, "another history"),
        Position("another table", 1, 9, 1, "c"),
        Position("table", 2, 9, 1, "c"),
        Position("table", 1, 8, 1, "c"),
    ],
)
def test_a_change_from_another_position_changes_nothing(store: PartitionStore, other: Position) -> None:
    with pytest.raises(StoreMoved, match="not at"):
        store.advance(other, at(9), [(JOB, "job", b"wrong")])
    for wrong in (other, None):
        with pytest.raises(StoreMoved, match="not at"):
            store.load(wrong, at(9), [(JOB, "job", b"wrong")])
    assert store.position() == at(1)
    assert content(store)["job"] == b"1"


def test_a_second_writer_of_the_same_change_is_refused(store: PartitionStore, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from schemas.state_store.partition_store import *\n"
        "store = PartitionStore(Path(sys.argv[1]))\n"
        "store.advance(Position('table', 1, 9, 1, 'c'), Position('table', 1, 9, 3, 'c'), [])\n"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "a store")],
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for _ in range(2)
    ]
    assert [one.returncode for one in done] == [0, 1]
    assert "StoreMoved" in done[1].stderr
    assert store.position() == at(3), "a store that is open sees what another process writes"


def test_a_load_replaces_everything_or_nothing(store: PartitionStore) -> None:
    def failing():
        yield JOB, "job", b"half"
        raise RuntimeError("the table is gone")

    with pytest.raises(RuntimeError):
        store.load(at(1), at(7), failing())
    assert (store.position(), content(store)["job"]) == (at(1), b"1")
    store.load(at(1), at(7), [(OTHER, "job", b"x"), (OTHER, "job", None), (OTHER, "progress", b"y")])
    assert store.position() == at(7)
    assert content(store) == {}
    assert content(store, OTHER) == {"progress": b"y"}


def test_a_snapshot_does_not_see_later_changes(store: PartitionStore) -> None:
    with store.snapshot() as snapshot:
        store.advance(at(1), at(2), [(JOB, "job", b"later")])
        assert snapshot.stream(JOB).get("job") == b"1"
        assert snapshot.position == at(1)
    assert content(store)["job"] == b"later"


def test_a_truncated_store_is_refused_when_it_is_opened(store: PartitionStore, tmp_path: Path) -> None:
    store.load(at(1), at(1), [(f"job/{number:08x}", "job", b"x" * 400) for number in range(2000)])
    store.close()
    file = tmp_path / "a store" / "data.mdb"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(StoreDamaged, match="truncated"):
        PartitionStore(tmp_path / "a store")


@pytest.mark.requirement("ST-02")
def test_a_store_whose_last_pages_became_free_at_once_is_opened_again(tmp_path: Path) -> None:
    # LMDB does not write a page that one transaction both takes and frees.
    draw, folder, waiting, number = random.Random(1), tmp_path / "a store", deque[str](), 0
    store, place = PartitionStore(folder), None
    for offset in range(1, 40):
        changes: list[EntryChange] = []
        for _ in range(draw.randint(1, 600)):
            number += 1
            waiting.append(f"{number:08d}")
            changes.append((JOB, waiting[-1], draw.randbytes(draw.randint(50, 400))))
        changes += [(JOB, waiting.popleft(), None) for _ in range(draw.randint(0, len(waiting)))]
        (store.advance if place else store.load)(place, at(offset), changes)
        store.close()
        place, store = at(offset), PartitionStore(folder)
        assert store.position() == place


@pytest.mark.requirement("ST-02")
@pytest.mark.parametrize("noted", [b"another-start-of-the-machine", b"", None])
def test_a_store_that_was_made_before_the_machine_was_started_again_is_refused(
    store: PartitionStore, tmp_path: Path, noted: bytes | None
) -> None:
    store.close()
    file = tmp_path / "a store" / "boot_id"
    assert file.read_bytes().decode() == boot_id()
    PartitionStore(tmp_path / "a store").close()
    file.unlink()
    if noted is not None:
        file.write_bytes(noted)
    with pytest.raises(StoreDamaged, match="before the machine was started again"):
        PartitionStore(tmp_path / "a store")


@pytest.mark.requirement("ST-02")
def test_where_the_machine_does_not_name_its_starts_the_store_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(PartitionStore(tmp_path / "named")) as store:
        assert not store._env.flags()["sync"]
    monkeypatch.setattr(local_store, "_BOOT_ID", tmp_path / "nothing")
    for _ in range(2):
        with closing(PartitionStore(tmp_path / "not named")) as store:
            assert store._env.flags()["sync"]


@pytest.mark.parametrize("damage", [b"", b"not a store at all" * 1000])
def test_a_file_that_is_no_store_is_refused_or_counts_as_new(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "a store"
    PartitionStore(folder).close()
    (folder / "data.mdb").write_bytes(damage)
    if damage:
        with pytest.raises(StoreDamaged, match="cannot be opened"):
            PartitionStore(folder)
    else:
        assert PartitionStore(folder).position() is None


def test_a_changed_byte_in_an_entry_is_noticed(store: PartitionStore, tmp_path: Path) -> None:
    store.advance(at(1), at(2), [(JOB, "job", b"the value of the entry")])
    store.close()
    file = tmp_path / "a store" / "data.mdb"
    found = file.read_bytes()
    assert b"the value of the entry" in found
    file.write_bytes(found.replace(b"the value of the entry", b"the value of the entrz"))
    with pytest.raises(StoreDamaged, match="job"):
        content(PartitionStore(tmp_path / "a store"))


WRITER = """
import sys
from contextlib import closing
from pathlib import Path
from schemas.state_store.partition_store import *
store = PartitionStore(Path(sys.argv[1]))
at = store.position() or Position("table", 1, 9, 0, "")
if at.offset == 0:
    store.load(None, at, [])
while True:
    after = Position("table", 1, 9, at.offset + 1, str(at.offset + 1))
    store.advance(at, after, [(f"job/{n:08x}", "job", b"%d" % after.offset * 50) for n in range(200)])
    at = after
    print(flush=True)
"""


@pytest.mark.long
def test_a_writer_that_is_killed_at_any_moment_leaves_whole_changes(tmp_path: Path) -> None:
    folder, ends = tmp_path / "killed", []
    for pause_s in (0.3, 0.31, 0.32, 0.33, 0.34):
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"\n"
            time.sleep(pause_s)
            writer.send_signal(signal.SIGKILL)
            writer.wait(30)
        store = PartitionStore(folder)
        with store.snapshot() as snapshot:
            assert snapshot.position is not None
            ends.append(snapshot.position.offset)
            values = {snapshot.stream(f"job/{number:08x}").get("job") for number in range(200)}
        store.close()
        assert values == {b"%d" % ends[-1] * 50}
    assert ends == sorted(set(ends)), "each goes on where the one before ended"


@pytest.mark.requirement("ST-02")
def test_a_new_store_has_the_disk_space_of_its_lock_file_which_is_written_through_a_memory_map(
    tmp_path: Path,
) -> None:
    with closing(PartitionStore(tmp_path / "store")):
        found = (tmp_path / "store" / "lock.mdb").stat()
        assert found.st_blocks * 512 >= found.st_size == 8192


@pytest.mark.requirement("ST-02")
def test_a_store_whose_folder_cannot_be_created_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(TrunklineError, match=r"the state store .* cannot be opened: .*Not a directory"):
        PartitionStore(tmp_path / "a file" / "store")


@pytest.mark.requirement("ST-02")
def test_a_store_whose_file_cannot_be_opened_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text(boot_id())
    (tmp_path / "data.mdb").mkdir()
    with pytest.raises(TrunklineError, match=r"cannot be opened: .*Is a directory") as found:
        PartitionStore(tmp_path)
    assert not isinstance(found.value, StoreDamaged), "the store would be deleted, and the next one not opened"


@pytest.mark.requirement("ST-02")
def test_a_store_on_a_full_disk_is_refused_with_the_reason(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(
            TrunklineError, match=r"the state store .* cannot be opened: .*File too large"
        ) as found:
            PartitionStore(tmp_path / "store")
        assert not isinstance(found.value, StoreDamaged), "a store that is whole would be deleted"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
