"""Logs: their ends are read without reading them whole, and they stay bounded."""

from __future__ import annotations

from pathlib import Path

from connectors.local_stack.log_files import keep_bounded, last_lines


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
