"""What programs write to their logs, of what libraries say, and what happens when they cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from schemas.settings import PROJECT_ROOT

_SAYS = """
import logging
from connectors.json_log import configure_json_log
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
from connectors.json_log import configure_json_log
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
    assert [line["event"] for line in told] == ["before", "log_lines_lost", "after", "later"]
    assert len(cut) == 20
    assert told[1]["lines"] == 2
