"""A Python worker's garbage collector does not walk the modules' objects again after each task."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.programs import run_program

_WORKER = """
import gc, sys
from jobs.spark.record_packing import pack_records
list(pack_records([]))
packed = gc.get_freeze_count()
import pyarrow as pa
from jobs.ledger.ledger_files import write_file
from jobs.spark.record_packing import to_cell
from jobs.settling.settling import settle_run
from schemas.fold.entries import Entries
from schemas.tables.ledger_arrow import ledger_batch
from schemas.wire.record import Record
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings
keyring = ensure_keyring(Settings(data_dir=sys.argv[1]))
list(pack_records([]))
again = gc.get_freeze_count()
rows = settle_run([Record("t", 0, 0, 0, None, None, (), ())], {None: Entries()}, keyring)
cells = pa.RecordBatch.from_pydict({"rows": pa.array([to_cell(ledger_batch(rows))], pa.binary())})
assert len(list(write_file(sys.argv[1], [cells]))) == 1
print(packed, again, gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_each_kind_of_task_keeps_what_its_modules_made_from_the_collector_once(
    tmp_path: Path,
) -> None:
    # In a process of its own: what is frozen stays so.
    ran = run_program([sys.executable, "-c", _WORKER, str(tmp_path)], check=True)
    packed, again, written, left = map(int, ran.stdout.split())
    assert packed > 10_000
    assert packed - 1_000 < again <= packed  # some of it has gone, nothing has come
    assert written > packed + 10_000
    assert left < 10_000
