"""The hub against its own OpenAPI page: schemathesis asks all that the page allows, and what it forbids."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.settings.settings import PROJECT_ROOT

# Answers that do not end are followed in tests of their own.
ENDLESS = {"/api/hub/events", "/api/hub/messages/events", "/api/hub/jobs/{job_id}/events", "/api/hub/verdicts"}
ENDLESS_GET = "^(" + "|".join(re.escape(path) for path in sorted(ENDLESS)) + ")$"
LIMIT_S = 280
HOOKS = "tests.connectors.doors.http_api.schemathesis_hooks"


@pytest.mark.requirement("HH-11")
@pytest.mark.requirement("HH-12")
@pytest.mark.parametrize("is_reading", [True, False], ids=["reading", "writing"])
def test_schemathesis_runs_clean(gateway, tmp_path, is_reading):
    chosen = (
        ["--include-method=GET", f"--exclude-path-regex={ENDLESS_GET}"]
        if is_reading
        else ["--exclude-method=GET"]
    )
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "--config-file",
        str(Path(__file__).with_name("schemathesis.toml")),
        "run",
        f"{gateway.url}/openapi.json",
        "--header",
        f"Authorization: Bearer {gateway.operator_token}",
        "--max-examples=5",
        "--phases=examples,coverage,fuzzing",
        *chosen,
        "--seed=20261122",
        "--no-color",
    ]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": str(PROJECT_ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    skipped = {(path, "get") for path in ENDLESS}
    with gateway.client() as client:
        page = client.get("/openapi.json").json()["paths"]
    listed = [(path, method) for path, methods in page.items() for method in methods]
    asked = sum((method == "get") == is_reading for path, method in listed if (path, method) not in skipped)
    assert f"Tested: {asked}" in done.stdout, "not every operation was asked"
