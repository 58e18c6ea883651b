"""How far ledger and views are, by the newest commits of their logs alone."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from connectors.hub.live.table_progress_reader import LedgerProgressReader, ViewProgressReader
from jobs.maintain_tables import tidy_ledger
from schemas.settings.settings import Settings
from schemas.tables.ledger import LEDGER
from tests.audited_ledger import AuditedLedger, ledger_row_at
from tests.connectors.ledger_tables import LedgerTable
from tests.mixed_tables import MixedTables, message
from trunkline_agent.errors import TrunklineError

pytestmark = pytest.mark.requirement("OP-21")


def test_ends_time_and_length_of_the_newest_micro_batch_are_in_its_commit(tmp_path: Path) -> None:
    ledger = AuditedLedger(tmp_path)
    reader = LedgerProgressReader(ledger.settings)
    found = reader.read()
    assert found is not None and (found.ends, found.rows, found.committed_at_s) == ({}, 0, None)
    ledger.commit_offsets({0: (0, 4), 1: (0, 3)})
    began = time.monotonic() - 1.5
    ledger.commit([ledger_row_at(0, at) for at in range(4, 9)], began=began)
    found = reader.read()
    assert found is not None and (found.ends, found.rows, found.batch_rows) == ({0: 9, 1: 3}, 12, 5)
    assert found.batch_s is not None and 1.5 <= found.batch_s < 30
    assert found.committed_at_s is not None and abs(time.time() - found.committed_at_s) < 30


def test_commits_of_maintenance_and_a_cleaned_log_do_not_hide_how_far_the_ledger_is(tmp_path: Path) -> None:
    ledger = AuditedLedger(tmp_path)
    reader = LedgerProgressReader(ledger.settings)
    ledger.commit_offsets({0: (0, 4)})
    ledger.commit_offsets({0: (4, 6)})
    tidy_ledger(ledger.settings)
    for known in (reader, LedgerProgressReader(ledger.settings)):
        found = known.read()
        assert found is not None and (found.ends, found.rows, found.batch_rows) == ({0: 6}, 6, 2)
    ledger.forget_log()
    # The log names no micro-batch any more; the chain file does, without its time.
    for known, rows in ((reader, 2), (LedgerProgressReader(ledger.settings), None)):
        found = known.read()
        assert found is not None and (found.ends, found.rows, found.batch_rows) == ({0: 6}, 6, rows)


def test_a_ledger_that_is_older_than_its_chain_gives_no_figure(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert LedgerProgressReader(settings).read() is None
    assert ViewProgressReader(settings).read() is None
    rows = LedgerTable(settings)
    rows.commit(rows.message("job/ab12cd34", b"{}"))
    with pytest.raises(TrunklineError, match="older than its audit chain"):
        LedgerProgressReader(settings).read()


@pytest.mark.long
def test_views_say_how_far_they_are_and_a_table_that_goes_away_gives_an_error(tmp_path: Path) -> None:
    tables = MixedTables(tmp_path)
    ledger, views = LedgerProgressReader(tables.settings), ViewProgressReader(tables.settings)
    for number in range(3):
        tables.settle(message(number))
        of_ledger, of_views = ledger.read(), views.read()
        assert of_ledger is not None and of_views is not None and of_ledger.ends == of_views.offsets
        assert sum(of_ledger.ends.values()) == number + 1
    path = Path(tables.settings.table_path(LEDGER))
    commit = path / "_delta_log" / f"{DeltaTable(path).version() + 1:020d}.json"
    commit.write_text("no JSON", encoding="utf-8")
    with pytest.raises(TrunklineError, match="cannot be read"):
        ledger.read()
    shutil.rmtree(tables.settings.tables_root)
    assert ledger.read() is None and views.read() is None
