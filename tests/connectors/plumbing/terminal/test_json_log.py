"""The logs of our programs: lines of libraries, and failures to write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.settings.settings import PROJECT_ROOT
from tests.programs import run_program, start_program

_SAYS = """
import logging
from connectors.plumbing.machine.json_log import configure_json_log
configure_json_log("tests", [])
selector = logging.getLogger("kafka.net.selector")
selector.warning("Slow callback")
selector.error("Error closing coroutine for cancelled task")
selector.error("IO loop crashed (client_id=%s)", "a")
"""


def test_of_the_kafka_client_errors_are_logged_and_not_that_it_was_closed_while_it_was_busy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SAYS], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["IO loop crashed (client_id=a)"]


_ON_A_FULL_DISK = """
import logging, os, resource, signal
import structlog
from connectors.plumbing.machine.json_log import configure_json_log
configure_json_log("tests", [])
log = structlog.stdlib.get_logger("here")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
log.info("before")
limit(os.fstat(2).st_size + 20)
log.info("cut off")
log.warning("refused")
logging.getLogger("library").warning("refused, too")
limit(resource.RLIM_INFINITY)
log.info("after")
limit(os.fstat(2).st_size)
logging.getLogger("library").warning("gone")
limit(resource.RLIM_INFINITY)
log.info("later")
"""


def test_a_log_on_a_full_disk_loses_lines_and_says_how_many_and_nothing_else_fails(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("wb") as stderr:
        subprocess.run(
            [sys.executable, "-c", _ON_A_FULL_DISK], cwd=PROJECT_ROOT, stderr=stderr, timeout=60, check=True
        )
    first, cut, *rest = file.read_text().splitlines()
    told = [json.loads(line) for line in (first, *rest)]
    events = ["before", "log_lines_lost", "after", "log_lines_lost", "later"]
    assert [line["event"] for line in told] == events
    assert len(cut) == 20
    assert [told[1]["lines"], told[3]["lines"]] == [3, 1]
    assert {frozenset(line) for line in told if "lines" not in line} == {
        frozenset({"event", "level", "logger", "program", "timestamp"})
    }
    assert {line["program"] for line in told} == {"tests"}


_WITHOUT_STDERR = """
import os, sys
import structlog
from connectors.plumbing.machine.json_log import configure_json_log
other = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
assert other == 2, other
configure_json_log("tests", [])
structlog.stdlib.get_logger("here").warning("nobody hears this")
"""


def test_a_program_without_stderr_writes_its_lines_into_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    script = 'exec "$0" -c "$1" "$2" 2>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, _WITHOUT_STDERR, str(file)],
        cwd=PROJECT_ROOT,
        timeout=60,
        check=True,
    )
    assert (done.returncode, file.read_bytes()) == (0, b"")


_WITH_A_SIGNAL = """
import os, signal
import structlog
from connectors.plumbing.machine.json_log import configure_json_log
configure_json_log("tests", [])
log = structlog.stdlib.get_logger("here")
def handler(*_):
    log.info("in the middle", text="")
    print("signal", flush=True)
signal.signal(signal.SIGALRM, handler)
write = os.write
def arming(number, given):
    os.write = write
    taken = write(number, given[:1000])
    # What follows is more than a pipe takes: the signal comes while it waits.
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return taken
os.write = arming
log.info("long", text="x" * 1_000_000)
"""


@pytest.mark.long
def test_a_signal_in_the_middle_of_a_long_line_cuts_nothing_off_and_its_handler_may_log() -> None:
    with start_program([sys.executable, "-c", _WITH_A_SIGNAL]) as program:
        assert program.stdout is not None and program.stderr is not None
        # Read only once the signal has come: the pipe is full until then.
        assert program.stdout.readline() == "signal\n"
        told = [json.loads(line) for line in program.stderr.read().splitlines()]
    said = [(line["event"], len(line["text"])) for line in told]
    assert said == [("long", 1_000_000), ("in the middle", 0)]


_BROKEN_OFF = """
import os
import structlog
from connectors.plumbing.machine.json_log import configure_json_log
configure_json_log("tests", [])
log = structlog.stdlib.get_logger("here")
write = os.write
def broken(number, given):
    os.write = write
    raise KeyboardInterrupt
os.write = broken
try:
    log.info("broken off")
except KeyboardInterrupt:
    log.info("the next")
    log.info("the last")
"""


def test_a_line_that_is_broken_off_keeps_no_other_back() -> None:
    done = run_program([sys.executable, "-c", _BROKEN_OFF], check=True)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["the next", "the last"]


_FREQUENT = """
import asyncio, structlog
from connectors.plumbing.machine.json_log import FrequentLines, configure_json_log
configure_json_log("tests", ["hidden-word"])
lines = FrequentLines("request", "here", ("route", "principal", "omitted"))
async def add():
    for number in range(3):
        lines.add(("/a", 'x"y', None), number / 1000)
    lines.add(("/a", "hidden-word", 7), 0.25)
    await asyncio.sleep(0.5)
    lines.add(("/b", None, None), 1)
asyncio.run(add())
structlog.stdlib.get_logger("here").info("request", ms=2.0, route="/c")
lines.flush()
"""


@pytest.mark.long
def test_frequent_lines_are_complete_without_secrets_and_written_soon_or_at_the_flush() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREQUENT],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["ms"] for line in found] == [0.0, 1.0, 2.0, 250.0, 2.0, 1000.0]
    other = found.pop(4)
    assert [line["route"] for line in found] == ["/a", "/a", "/a", "/a", "/b"]
    assert [line.get("principal") for line in found] == ['x"y', 'x"y', 'x"y', "[secret]", None]
    assert [line.get("omitted") for line in found] == [None, None, None, 7, None]
    for line in found:
        assert set(line) - {"principal", "omitted"} == set(other)
        assert {line[key] for key in ("program", "level", "event")} == {"tests", "info", "request"}
        assert len(line["timestamp"]) == len(other["timestamp"])


_FREQUENT_ON_A_FULL_DISK = """
import asyncio, os, resource, signal
from connectors.plumbing.machine.json_log import FrequentLines, configure_json_log
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
configure_json_log("tests")
lines = FrequentLines("request", "here", ("route",))
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
async def add():
    for number in range(100):
        lines.add((f"/{number}",), 0)
    limit(os.fstat(2).st_size + 1000)
    lines.flush()
    limit(resource.RLIM_INFINITY)
    lines.add(("/last",), 0)
    lines.flush()
asyncio.run(add())
"""


def test_of_lines_that_are_written_together_each_one_that_is_lost_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("wb") as stderr:
        subprocess.run(
            [sys.executable, "-c", _FREQUENT_ON_A_FULL_DISK],
            cwd=PROJECT_ROOT,
            stderr=stderr,
            timeout=60,
            check=True,
        )
    *whole, cut, lost, last = file.read_text().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)
    assert [json.loads(line)["route"] for line in whole] == [f"/{number}" for number in range(len(whole))]
    assert (json.loads(lost)["lines"], json.loads(last)["route"]) == (100 - len(whole), "/last")
