"""A file queue in a folder of its own, in an environment without settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trunkline_agent.queue import Queue


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the caller's environment reaches a queue, and none lies outside the test's folder."""
    for name in [n for n in os.environ if n.startswith(("TRUNKLINE_", "ZOS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    """A queue that does not wait for the disk."""
    return Queue(tmp_path / "q", fsync=False)


@pytest.fixture
def session_path(queue: Queue) -> Path:
    """The folder of the default session of `queue`."""
    return queue.root / "sessions" / "default"
