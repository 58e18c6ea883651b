"""Fixtures for sessions of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.programs.processes.session_host import SessionHost
from tests.connectors.programs.processes.session_processes import session_host


@pytest.fixture(params=["tmux", "process"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionHost]:
    """A host of each kind."""
    with session_host(tmp_path, request.param) as found:
        yield found
