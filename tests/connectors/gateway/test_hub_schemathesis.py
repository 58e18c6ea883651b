"""The hub against its own OpenAPI page: schemathesis asks all that the page allows, and what it forbids."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Answers that do not end are followed in tests of their own.
ENDLESS = r"/events$|/verdicts$"
LIMIT_S = 200


@pytest.mark.requirement("HH-11")
@pytest.mark.requirement("HH-12")
@pytest.mark.parametrize("operations", ["include", "exclude"], ids=["reading", "writing"])
def test_schemathesis_runs_clean(gateway, tmp_path, operations):
    is_reading = operations == "include"
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
        *([f"--exclude-path-regex={ENDLESS}"] if is_reading else []),
        f"--{operations}-method=GET",
        "--seed=20261122",
        "--no-color",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    with gateway.client() as client:
        page = client.get("/openapi.json").json()["paths"]
    listed = [(path, method == "get") for path, methods in page.items() for method in methods]
    asked = sum(is_get == is_reading and not (is_get and re.search(ENDLESS, path)) for path, is_get in listed)
    assert f"Tested: {asked}" in done.stdout, "not every operation was asked"
