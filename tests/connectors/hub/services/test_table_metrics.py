"""Figures of tables whose store does not answer."""

from __future__ import annotations

import json
import os
import socket
import sys

import pytest

from schemas.settings.settings import PROJECT_ROOT
from tests.programs import run_program

# In a process of its own that ends at once: a thread still waits for the store when it does.
_SCRAPES = """
import json, os, sys, time
from pathlib import Path
from connectors.hub.services.table_metrics import TableMetrics
from connectors.hub.live.live_view import LiveView
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings, StorageSettings

settings = Settings(data_dir=Path(sys.argv[1]), storage=StorageSettings(tables="s3://bucket/tables"))
metrics = TableMetrics(settings, LiveView(settings, Keyring({"test": b"k" * 32}, "test")))
took, figures = [], {}
for _ in range(2):
    began = time.monotonic()
    figures = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    took.append(time.monotonic() - began)
print(json.dumps([took, figures]), flush=True)
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.requirement("OP-21")
def test_a_store_that_never_answers_costs_a_scrape_little_and_gives_no_figure(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_REGION": "none",
        }
        done = run_program(
            [sys.executable, "-c", _SCRAPES, str(tmp_path)],
            env={**os.environ, **store, "PYTHONPATH": str(PROJECT_ROOT)},
            check=True,
        )
    took, figures = json.loads(done.stdout)
    assert max(took) < 10
    assert figures == {"trunkline_ledger_up": 0, "trunkline_view_up": 0}
