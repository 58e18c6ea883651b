"""The streaming jobs on a machine that has almost no time for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.log.publisher import Publisher
from connectors.programs.local_stack import LocalStack, child_process
from schemas.keys.sealing import load_keyring
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.registered_jobs import register_job
from tests.starved import a_tenth_of_the_processor

WITHIN_S = 900


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 120)
@pytest.mark.requirement("OP-01")
def test_the_ledger_advances_with_a_tenth_of_the_processor(tmp_path: Path):
    settings = settings_in(tmp_path / "data")
    deadline = time.monotonic() + WITHIN_S
    with (
        LocalStack(settings, ("kafka",)) as stack,
        a_tenth_of_the_processor(child_process.mark_of(settings.data_path, "streams")),
    ):
        stack.add(["streams"])
        with Publisher(settings) as log:
            job = register_job(log, load_keyring(settings), "settled slowly")
        while True:
            stack.look_after()
            reader = LedgerReader(settings)
            if reader.exists():
                rows = reader.rows(LedgerFilter(type="job.registered"), ["stream_id"]).rows.to_pylist()
                if rows == [{"stream_id": job.job_id}]:
                    break
            assert time.monotonic() < deadline, stack["streams"].error
            time.sleep(0.5)
        assert (stack["streams"].restarts, stack["streams"].failures) == (0, 0)
