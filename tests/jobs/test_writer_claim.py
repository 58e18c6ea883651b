"""Two settling jobs for one ledger, as on two machines: the second is refused, or takes over and fences."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError

from connectors.programs.local_stack.part_plan import class_path
from connectors.tools.audit.verification import verify
from jobs import build_views
from jobs.driver.programs import WriterClaim
from jobs.ledger.ledger_table import create_ledger
from jobs.settling.ledger_sink import LedgerSink, SecondWriter
from schemas.keys.sealing import Keyring
from schemas.settings.settings import PROJECT_ROOT, Settings, SparkSettings, ViewSettings
from schemas.streams.fold import STREAM_ENTRIES
from tests.audited_ledger import AuditedLedger
from tests.broker_processes import ProgramProcess, program_environment, stand_still, wait_until
from tests.jobs.conftest import DRAIN_LIMIT_S, ledger_rows
from tests.jobs.test_run_streams import JOB, status_of
from tests.jobs.topic_load import append_all, event, registration
from trunkline_agent.errors import Refused

SILENT_S = 3.0
# Claims the ledger, says so, and ends without a word when its input ends.
_HOLDER = """
import os, sys
from jobs.driver.programs import WriterClaim
from schemas.settings.settings import load_settings
with WriterClaim(load_settings()) as claim:
    print("claimed", flush=True)
    sys.stdin.read()
    os._exit(1)
"""


@pytest.fixture
def one(backbone_settings: Settings) -> Settings:
    """The settings of a job on one machine. Its ledger is there."""
    settings = backbone_settings.model_copy(update={"spark": SparkSettings(silent_after_s=SILENT_S)})
    create_ledger(settings)
    return settings


@pytest.fixture
def other(one: Settings, tmp_path: Path) -> Settings:
    """The settings of a job on another machine, with the same log, keys and tables alone in common."""
    storage = one.storage.model_copy(update={"tables": one.tables_root})
    update = {"data_dir": tmp_path / "other", "storage": storage, "master_key_file": one.key_file}
    return one.model_copy(update=update)


@pytest.fixture
def holder(one: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has claimed the ledger."""
    command = [sys.executable, "-c", _HOLDER]
    environment = program_environment(one) | {"PYTHONPATH": ":".join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"claimed\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.requirement("DP-13")
def test_a_second_job_is_refused_with_the_place_of_the_first_and_begins_at_once_when_that_has_ended(
    one: Settings, other: Settings
) -> None:
    with WriterClaim(one) as claim:
        with (
            pytest.raises(Refused, match=r"process \d+ on .* writing the tables"),
            WriterClaim(other),
        ):
            pass
        claim.check()
        assert claim.lost is None
    began = time.monotonic()
    with WriterClaim(other):
        assert time.monotonic() - began < SILENT_S / 2


@pytest.mark.requirement("DP-13")
@pytest.mark.parametrize("command", [("jobs.rebuild_views",), ("jobs.switch_fold", "--at", "{}")])
def test_no_other_program_writes_the_tables_beside_a_job_of_another_machine(
    one: Settings, other: Settings, command: Sequence[str]
) -> None:
    with WriterClaim(one):
        program = [sys.executable, "-m", *command]
        refused = subprocess.run(
            program, cwd=PROJECT_ROOT, env=program_environment(other), capture_output=True, timeout=60
        )
    assert (refused.returncode, b"writing the tables: stop it" in refused.stderr) == (4, True), refused.stderr


@pytest.mark.requirement("DP-13")
def test_a_job_that_was_killed_on_this_machine_keeps_nobody_waiting(
    other: Settings, holder: subprocess.Popen[bytes]
) -> None:
    holder.kill()
    holder.wait(20)
    began = time.monotonic()
    with WriterClaim(other):
        assert time.monotonic() - began < SILENT_S / 2


@pytest.mark.requirement("DP-13")
def test_of_a_job_elsewhere_nothing_but_its_silence_is_known(one: Settings, other: Settings) -> None:
    beat = Path(one.tables_root) / "_writer.json"
    with WriterClaim(one):
        found = json.loads(beat.read_text())
    found["place"] |= {"boot": "another machine's", "pid": 1}
    beat.write_text(json.dumps(found))
    began = time.monotonic()
    with WriterClaim(other):
        assert time.monotonic() - began >= SILENT_S


@pytest.mark.requirement("DP-13")
def test_a_sign_of_life_that_cannot_be_read_delays_the_next_job_and_does_not_prevent_it(
    one: Settings, other: Settings
) -> None:
    beat = Path(one.tables_root) / "_writer.json"
    for damaged in ("", "[1]", '{"claim"'):
        beat.write_text(damaged)
        began = time.monotonic()
        with WriterClaim(other) as claim:
            assert time.monotonic() - began >= SILENT_S
            claim.check()
            assert json.loads(beat.read_text())["number"] >= 1
        assert not beat.exists()


@pytest.mark.requirement("DP-13")
def test_of_two_jobs_that_claim_at_once_the_first_sees_that_it_has_lost(one: Settings, other: Settings) -> None:
    first, second = WriterClaim(one), WriterClaim(other)
    real = first._beat

    def beat_late() -> None:
        first._beat = real  # type: ignore[method-assign]
        second.__enter__()
        real()

    first._beat = beat_late  # type: ignore[method-assign]
    try:
        with pytest.raises(Refused, match="another process has taken over"):
            first.__enter__()
        second.check()
    finally:
        second.__exit__(None, None, None)


@pytest.mark.requirement("DP-13")
def test_a_claim_removes_no_commit_whose_entry_may_be_nowhere_else(tmp_path: Path) -> None:
    ledger = AuditedLedger(tmp_path)
    ledger.commit_offsets({0: (0, 3)})
    versions = ledger.log_versions()
    DeltaTable(ledger.path).create_checkpoint()
    then = time.time() - 3 * 3600
    for file in Path(ledger.path, "_delta_log").iterdir():
        os.utime(file, (then, then))
    for _ in range(2):
        with WriterClaim(ledger.settings):
            pass
    assert set(versions) <= set(ledger.log_versions())


@pytest.mark.requirement("DP-14")
def test_a_job_that_stood_still_across_the_take_over_commits_nothing_to_any_table(
    one: Settings, other: Settings, holder: subprocess.Popen[bytes]
) -> None:
    build_views.prepare(one)
    # As the job that stands still has read them.
    sink = LedgerSink(one)
    entries = DeltaTable(one.table_path(STREAM_ENTRIES))
    stand_still(holder)
    with WriterClaim(other):
        with pytest.raises(SecondWriter, match="another process has taken over"):
            sink.next_plan()
        with pytest.raises(CommitFailedError):
            entries.create_write_transaction(
                [],
                mode="append",
                schema=entries.schema(),
                partition_by=entries.metadata().partition_columns,
                commit_properties=CommitProperties(max_commit_retries=0),
            )


@pytest.fixture
def streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProgramProcess]]:
    """Starts the streaming jobs with some settings."""
    arguments = [
        "--properties-file",
        str(PROJECT_ROOT / "conf" / "spark-defaults.conf"),
        "--master",
        "local[2]",
    ]
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    started: list[ProgramProcess] = []

    def start(settings: Settings) -> ProgramProcess:
        name = f"streams-{len(started)}"
        more = ["--conf", f"spark.local.dir={tmp_path / name}", "--driver-class-path", class_path()]
        monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", shlex.join([*arguments, *more, "pyspark-shell"]))
        views = ViewSettings(interval_ms=200, maintenance_interval_s=0)
        settings = settings.model_copy(update={"views": views})
        started.append(ProgramProcess("jobs.run_streams", settings, tmp_path, name))
        return started[-1]

    yield start
    for program in started:
        program.process.send_signal(signal.SIGCONT)
        program.kill()


@pytest.mark.requirement("DP-13")
@pytest.mark.requirement("DP-14")
@pytest.mark.timeout(600)
def test_a_job_that_hangs_is_replaced_and_ends_when_it_wakes_with_each_record_settled_once(
    streams: Callable[..., ProgramProcess], one: Settings, other: Settings, keyring: Keyring
) -> None:
    first = streams(one)
    first.wait_ready(DRAIN_LIMIT_S)
    refused = streams(other)
    wait_until(lambda: refused.process.poll() is not None, DRAIN_LIMIT_S, "the second one is refused")
    assert refused.process.returncode == 4 and "is writing the tables: stop it first" in refused.log()
    append_all(one, [registration(JOB, keyring)])
    wait_until(lambda: status_of(one) == "pending", DRAIN_LIMIT_S, "the first one settles")
    stand_still(first.process)
    second = streams(other)
    second.wait_ready(DRAIN_LIMIT_S)
    append_all(one, [event(JOB, 1, "started")])
    wait_until(lambda: status_of(one) == "running", DRAIN_LIMIT_S, "the second one settles")
    first.process.send_signal(signal.SIGCONT)
    append_all(one, [event(JOB, 2, "completed")])
    wait_until(lambda: first.process.poll() is not None, DRAIN_LIMIT_S, "the first one ends")
    assert first.process.returncode == 1 and "another process has taken over" in first.log()
    wait_until(lambda: status_of(one) == "completed", DRAIN_LIMIT_S, "the second one goes on")
    assert second.stop(timeout_s=60) == 0, second.log()[-3000:]
    assert set(Counter((row["partition"], row["offset"]) for row in ledger_rows(one)).values()) == {1}
    assert verify(one).findings == ()
    command = [sys.executable, "-m", "jobs.rebuild_views", "--check"]
    assert subprocess.run(command, cwd=PROJECT_ROOT, env=program_environment(other), timeout=60).returncode == 0
