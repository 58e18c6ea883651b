"""The file bridge notices each change at once, also one that was made while it was busy (FQ-15)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.doors.file_bridge.queue_folder import FolderWatch

pytestmark = pytest.mark.requirement("FQ-15")
LONG_S = 5.0


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[FolderWatch]:
    (tmp_path / "queue").mkdir()
    found = FolderWatch(str(tmp_path / "queue"), threading.Event(), LONG_S, lambda name: name.startswith("own"))
    threading.Timer(0.2, (tmp_path / "queue" / "first").touch).start()
    found.wait()  # it begins to watch
    yield found
    found.close()


def waited_s(watch: FolderWatch) -> float:
    began = time.monotonic()
    watch.wait()
    return time.monotonic() - began


@pytest.mark.long
def test_a_change_between_two_waits_ends_the_next_one(watch: FolderWatch, tmp_path: Path) -> None:
    (tmp_path / "queue" / "line").write_text("a line")
    time.sleep(0.3)  # the bridge reads the files meanwhile
    assert waited_s(watch) < LONG_S / 2


@pytest.mark.long
def test_changes_of_its_own_files_end_no_wait(watch: FolderWatch, tmp_path: Path) -> None:
    (tmp_path / "queue" / "own.cursor").write_text("0")
    threading.Timer(0.5, (tmp_path / "queue" / "line").touch).start()
    assert 0.4 < waited_s(watch) < LONG_S / 2


@pytest.mark.long
def test_a_folder_that_was_replaced_is_watched_again(watch: FolderWatch, tmp_path: Path) -> None:
    (tmp_path / "queue").rename(tmp_path / "old")
    (tmp_path / "queue").mkdir()
    threading.Timer(0.5, (tmp_path / "queue" / "line").touch).start()
    assert waited_s(watch) < LONG_S / 2


def test_a_folder_below_is_watched_too(watch: FolderWatch, tmp_path: Path) -> None:
    (tmp_path / "queue" / "session").mkdir()
    assert waited_s(watch) < LONG_S / 2
    (tmp_path / "queue" / "session" / "line").write_text("a line")
    assert waited_s(watch) < LONG_S / 2
