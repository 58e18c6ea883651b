"""What programs write to their logs of what libraries say."""

from __future__ import annotations

import json
import subprocess
import sys

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
