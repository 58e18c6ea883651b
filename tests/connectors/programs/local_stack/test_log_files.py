"""Logs: their ends are read without reading them whole, and they stay bounded."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from connectors.programs.local_stack.data_files import DiskTrouble, keep_bounded, last_lines


def test_the_last_lines_of_a_large_log_are_read_from_its_end(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n" for number in range(50_000)))
    assert last_lines(log, 2) == ["line 49998", "line 49999"]
    assert last_lines(log, 0) == []
    assert len(last_lines(log, 60_000)) == 50_000
    assert last_lines(tmp_path / "none.log", 5) == []


def test_a_log_that_has_grown_too_large_is_moved_away_while_it_is_written(tmp_path: Path):
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        assert not keep_bounded(log, limit_bytes=100)
        writer.write(b"y")
        assert keep_bounded(log, limit_bytes=100)
        writer.write(b"next\n")
    assert log.read_bytes() == b"next\n"
    assert (tmp_path / "a.log.1").stat().st_size == 101


def test_a_disk_that_does_not_take_the_copy_leaves_the_log_and_no_half_copy(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 5000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # To this process the disk is full after 4000 bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            keep_bounded(log, limit_bytes=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert log.stat().st_size == 5000
    assert not (tmp_path / "a.log.1").exists()
    assert keep_bounded(log, limit_bytes=100)


def test_trouble_with_the_disk_is_told_once_and_again_after_it_was_over(capsys: pytest.CaptureFixture[str]):
    def attempt(trouble: DiskTrouble, what: str, *, fails: bool) -> None:
        with trouble.tolerated(what):
            if fails:
                raise OSError(28, "No space left on device")

    trouble = DiskTrouble(retry_s=0.0)
    for fails in (True, True, False, True):
        attempt(trouble, "a log", fails=fails)
    assert (
        capsys.readouterr().out.splitlines()
        == ["a log: [Errno 28] No space left on device; going on without"] * 2
    )
    patient = DiskTrouble(retry_s=60.0)
    attempt(patient, "a log", fails=True)
    assert (patient.is_due("a log"), patient.is_due("the state")) == (False, True)
    with pytest.raises(ValueError, match="ours"), patient.tolerated("a log"):
        raise ValueError("ours")
