"""A running bridge with its gateway, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from tests.connectors.doors.file_bridge.bridge_run import BridgeRun


@pytest.fixture(name="run")
def running_bridge(backbone_settings: Settings, keyring: Keyring, tmp_path: Path) -> Iterator[BridgeRun]:
    """Bridge and gateway, both up."""
    found = BridgeRun(backbone_settings, keyring, tmp_path)
    try:
        yield found
    finally:
        found.close()
