"""Accounts of new jobs are written at once when few come, and together under load."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from connectors.doors.mqtt_accounts import mqtt_accounts
from connectors.doors.mqtt_accounts.mosquitto_files import PASSWORDS, PID
from connectors.doors.mqtt_accounts.mqtt_accounts import MqttAccounts
from connectors.programs.local_stack import LocalStack
from tests.connectors.folded_jobs import KEYRING, FoldedJobs
from tests.connectors.programs.local_stack.conftest import settings_in

EFFECTIVE_S = 20.0


@pytest.mark.mosquitto
@pytest.mark.requirement("ST-72")
def test_accounts_are_written_at_once_when_few_come_and_together_under_load(tmp_path: Path) -> None:
    with LocalStack(settings_in(tmp_path), ("mosquitto",)) as stack:
        jobs = FoldedJobs()
        accounts = MqttAccounts(stack.settings, KEYRING, jobs)
        jobs.listeners.append(accounts.on_change)
        spans: list[tuple[float, float]] = []
        apply = accounts._apply

        def timed_apply(newest: str | None) -> bool:
            begun = time.monotonic()
            found = apply(newest)
            spans.append((begun, time.monotonic()))
            return found

        accounts._apply = timed_apply  # type: ignore[method-assign]
        accounts.open()
        with closing(accounts):
            for _ in range(3):
                time.sleep(1.5)
                before = time.monotonic()
                assert accounts.wait_effective(jobs.register()[0], EFFECTIVE_S)
                assert spans[-1][0] - before < 0.5, "the first one after a pause waits for no other"
            spans.clear()
            until, job_ids = time.monotonic() + 3, list[str]()
            while time.monotonic() < until:
                job_ids.append(jobs.register()[0])
                time.sleep(0.0005)
            assert all(accounts.wait_effective(job_id, EFFECTIVE_S) for job_id in job_ids)
    rests = [later[0] - earlier[1] for earlier, later in itertools.pairwise(spans)]
    assert len(spans) > 2 and len(job_ids) > 5 * len(spans)
    for (begun, ended), rest in zip(spans, rests, strict=False):
        assert min(1.9 * (ended - begun), 1.0) <= rest + 0.001 < 2 + 2 * (ended - begun), spans


@pytest.mark.mosquitto
@pytest.mark.requirement("ST-72")
def test_a_broker_that_needs_long_to_read_its_files_is_told_seldom_and_has_all_accounts_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_accounts, "_REST_MOST_S", 0.05)
    monkeypatch.setattr(mqtt_accounts, "_RETRY_S", 0.05)
    with LocalStack(settings_in(tmp_path), ("mosquitto",)) as stack:
        jobs = FoldedJobs()
        accounts = MqttAccounts(stack.settings, KEYRING, jobs)
        jobs.listeners.append(accounts.on_change)
        accounts.open()
        with closing(accounts):
            assert accounts.wait_effective(jobs.register()[0], EFFECTIVE_S)
            folder = stack.settings.mqtt.accounts_dir
            assert folder is not None
            broker, files, until = int((folder / PID).read_text()), set[int](), time.monotonic() + 6.5
            os.kill(broker, signal.SIGSTOP)
            try:
                job_id = jobs.register()[0]
                while time.monotonic() < until:
                    files.add((folder / PASSWORDS).stat().st_mtime_ns)
                    time.sleep(0.01)
            finally:
                os.kill(broker, signal.SIGCONT)
            # The file before, and those after waits of 0, 1, 2 and 4 s.
            assert 2 <= len(files) <= 5
            assert accounts.wait_effective(job_id, EFFECTIVE_S)
